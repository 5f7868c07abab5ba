"""The actors of a node, made where they are missing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wgpu_lora.cluster.facts import NAMESPACE
from wgpu_lora.cluster.node.device_actor import Device
from wgpu_lora.cluster.node.host_actor import Host
from wgpu_lora.cluster.node.remote import host_name

CALLS = 16  # that an actor answers at once
KINDS = ("host", "device", "evaluation", "caching")  # of their names


def device_name(node: str, key: str) -> str:
    """The name of a device's actor."""
    return f"device:{node}:{key}"


def host(node: str, namespace: str = NAMESPACE) -> Any:
    """The handle of the actor of a node's host.

    Raises:
        LookupError: Ray knows no such living node.
    """
    address = str(_node(node)["NodeManagerAddress"])
    return ray.remote(Host).options(**_placed(host_name(node), node, namespace)).remote(node, address)


def device(node: str, key: str, namespace: str = NAMESPACE) -> Any:
    """The handle of the actor of a node's device. It takes the device's resource, if the node advertises it.

    Raises:
        LookupError: Ray knows no such living node.
    """
    said = _node(node)
    taken = {key: 1.0} if said["Resources"].get(key) else {}
    placed = _placed(device_name(node, key), node, namespace)
    address = str(said["NodeManagerAddress"])
    return ray.remote(Device).options(**placed, resources=taken).remote(node, address, key)


def end_all(namespace: str = NAMESPACE) -> None:
    """End all actors of nodes that there are."""
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == namespace and named["name"].partition(":")[0] in KINDS:
            with suppress(ValueError, ray.exceptions.RayError):  # it has ended meanwhile
                ray.kill(ray.get_actor(named["name"], namespace=namespace))


def _node(node: str) -> dict[str, Any]:
    for said in ray.nodes():
        if said["NodeID"] == node and said["Alive"]:
            found: dict[str, Any] = said
            return found
    raise LookupError(f"Ray has no living node {node}")


def _placed(name: str, node: str, namespace: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_concurrency": CALLS,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
