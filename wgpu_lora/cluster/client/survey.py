"""The nodes of a cluster before a run: whether they can be used, and which hosts are not there."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from wgpu_lora.cluster.client.asking import Asking
from wgpu_lora.cluster.client.refusals import Refusals
from wgpu_lora.cluster.facts import NodeFacts, Versions, from_plain
from wgpu_lora.text import join_words

if TYPE_CHECKING:
    from wgpu_lora.cluster.spec.file import ClusterFile
    from wgpu_lora.cluster.spec.hosts import HostSpec

MOST_HOSTS = 3  # that a sentence names
SURVEY_SECONDS = 120.0


def surveyed(cluster: Asking, own: Versions, here: bool = False) -> list[NodeFacts]:
    """The nodes of the cluster, with their devices as they are now.

    Args:
        here: it is Ray of this machine.

    Raises:
        UserError: a node has another version of something than this machine, or there is no device.
    """
    nodes = [from_plain(NodeFacts, one) for one in cluster.coordinator("nodes", seconds=SURVEY_SECONDS)]
    refusals = Refusals()
    refusals.add(*_other_versions(nodes, own, here))
    if not any(node.devices for node in nodes):
        refusals.add(
            f"The cluster has no WebGPU device ({listed_hosts(nodes)}): see 'wgpu-lora info' on its machines."
            if nodes
            else "The cluster has no node that answers: see 'wgpu-lora cluster status'."
        )
    refusals.settle()
    return nodes


def _other_versions(nodes: Iterable[NodeFacts], own: Versions, here: bool) -> Iterable[str]:
    from wgpu_lora.cluster.devices.versions import difference

    for node in nodes:
        if not (what := difference(own, node.versions)):
            continue
        if here:
            yield (
                f"Ray of this machine was started before something changed here ({what}): end it with "
                "'wgpu-lora cluster down --local', and run again."
            )
        else:
            yield f"{node.host} ({node.address}) differs from this machine: {what}; install the same there and here."


def missing_hosts(nodes: Sequence[NodeFacts], spec: ClusterFile) -> list[str]:
    """The hosts of a cluster file that are no nodes of the cluster now, by their addresses or names."""
    known = {node.address for node in nodes} | {node.host.partition(".")[0] for node in nodes}
    return [
        f"{host.host} ({host.address})" if host.address else host.host
        for host in spec.hosts
        if not known & {_address(host), host.host.partition(".")[0]}
    ]


def _address(host: HostSpec) -> str | None:
    with suppress(OSError):
        return host.address or socket.gethostbyname(host.host)
    return None


def listed_hosts(nodes: Sequence[NodeFacts]) -> str:
    """The names of hosts, of which there may be many."""
    names = [node.host for node in nodes]
    return join_words(names[:MOST_HOSTS], len(names) - MOST_HOSTS if len(names) > MOST_HOSTS else 0)
