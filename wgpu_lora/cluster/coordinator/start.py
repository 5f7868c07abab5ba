"""The coordinator's actor: found by its name, or made on the cluster's head. Imports Ray."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wgpu_lora.cluster.coordinator.actor import Coordinator
from wgpu_lora.cluster.facts import COORDINATOR, NAMESPACE
from wgpu_lora.errors import UserError

HEAD = "node:__internal_head__"  # the resource that Ray gives the head alone


def coordinator(namespace: str = NAMESPACE) -> Any:
    """The handle of the cluster's coordinator, which is made if there is none.

    It is detached, so that jobs go on without a driver, and Ray starts it again whenever it dies, with its journal. It
    is on the head alone, where the journal is: without the head there is no cluster.

    Raises:
        UserError: Ray lists no living head.
    """
    head = next((node for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"]), None)
    if head is None:
        raise UserError("Ray lists no living head node of this cluster: start the cluster again.")
    options = {
        "name": COORDINATOR,
        "namespace": namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(head["NodeID"], soft=False),
    }
    return ray.remote(Coordinator).options(**options).remote(head["NodeID"])


def existing(namespace: str = NAMESPACE) -> Any | None:
    """The handle of the coordinator, if there is one."""
    with suppress(ValueError):
        return ray.get_actor(COORDINATOR, namespace=namespace)
    return None
