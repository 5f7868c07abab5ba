"""The actor that measures held-out losses on a device while others train. Imports Ray."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wgpu_lora.cluster.devices.probe import node_devices
from wgpu_lora.cluster.facts import NAMESPACE, Copy, Task, from_plain
from wgpu_lora.cluster.node.evaluator import Evaluator
from wgpu_lora.cluster.node.layout import Layout, cluster_root
from wgpu_lora.cluster.node.listing import FileFacts
from wgpu_lora.cluster.node.options import options_here
from wgpu_lora.cluster.node.plainly import plainly
from wgpu_lora.cluster.node.remote import RemoteShelf, call, host_name, own_environment
from wgpu_lora.cluster.node.transfer import Unreachable
from wgpu_lora.errors import UserError


class EvaluationDevice:
    """Runs once per device that measures. What a person caused is {"refused": sentence}."""

    def __init__(self, address: str, key: str):
        own_environment()
        self._layout = Layout(cluster_root())
        self._evaluator = Evaluator(
            self._layout.root / "evaluations" / str(os.getpid()),
            lambda: next((found.index for found in node_devices(address) if found.key == key), None),
        )

    @plainly
    def measure(self, run: str, task: dict[str, Any], copy: dict[str, Any]) -> dict[str, Any]:
        """{"step", "loss"} of a task's newest checkpoint; empty if its results are there, which training has measured.

        Args:
            copy: that has been accepted. Its shelf may have a newer one by now, which is measured instead.
        """
        asked, told = from_plain(Task, task), from_plain(Copy, copy)
        shelf, name = RemoteShelf(told.host), host_name(told.host)

        def read(file: FileFacts, offset: int) -> bytes:
            return shelf.read(kept.unit, kept.digest, file.path, offset)

        try:
            held = call(name, "held", told.unit)
            kept = from_plain(Copy, held) if held else told
            if kept.final:
                return {}
            files = shelf.files(kept.unit, kept.digest)
            here = Task(asked.name, options_here(asked.options, self._layout), asked.output)
            return self._evaluator.measure(run, here, files, read)
        except Unreachable as error:
            raise UserError(f"The copy of {asked.name} cannot be read: {error}") from None

    def rest(self) -> None:
        """End the process that measures."""
        self._evaluator.rest()


def evaluation_device(node: str, address: str, key: str) -> Any:
    """The handle of the actor that measures on a device; it takes none of the device's resource, since the ledger of
    memory counts what it needs."""
    options = {
        "name": f"evaluation:{node}:{key}",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return ray.remote(EvaluationDevice).options(**options).remote(address, key)
