"""The actor that makes teacher caches on a device while others train. Imports Ray."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wgpu_lora.cluster.devices.probe import node_devices
from wgpu_lora.cluster.facts import NAMESPACE, to_plain
from wgpu_lora.cluster.node.caching import Caching
from wgpu_lora.cluster.node.layout import Layout, cluster_root
from wgpu_lora.cluster.node.options import options_here, parcels_of
from wgpu_lora.cluster.node.parcels import obtain, push
from wgpu_lora.cluster.node.plainly import plainly
from wgpu_lora.cluster.node.remote import own_environment
from wgpu_lora.cluster.node.sent import Sent


class CachingDevice:
    """Runs once per device that makes caches; its process dies with it."""

    def __init__(self, node: str, address: str, key: str):
        own_environment()
        layout = Layout(cluster_root())
        sent = Sent(layout.sent)

        def options(given: dict[str, Any]) -> dict[str, Any]:
            for digest in parcels_of(given):
                obtain(sent, digest, [])
            return options_here(given, layout)

        self._caching = Caching(
            layout,
            node,
            lambda: next((found.index for found in node_devices(address) if found.key == key), None),
            options,
            lambda parcel, to: push(sent, parcel, to),
        )

    @plainly
    def make(self, run: str, name: str, options: dict[str, Any], attempt: int, keeper: str) -> dict[str, Any]:
        """A CacheStanding; see `Caching.make`. It returns at once."""
        return to_plain(self._caching.make(run, name, options, attempt, keeper))

    @plainly
    def stop(self, run: str, name: str) -> None:
        """End the process that makes these caches."""
        self._caching.stop(run, name)


def caching_device(node: str, address: str, key: str) -> Any:
    """The handle of the actor that makes teacher caches on a device; it takes none of the device's resource, since the
    ledger of memory counts what it needs."""
    options = {
        "name": f"caching:{node}:{key}",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_concurrency": 4,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return ray.remote(CachingDevice).options(**options).remote(node, address, key)
