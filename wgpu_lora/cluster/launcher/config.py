"""What Ray's launcher is given for each host: a configuration, and the files that it puts there. All values are data.

Each host is a cluster of its own to `ray up`, whose start command joins the head. With one configuration for all, Ray
would copy the SSH key of the person to the head, could use only one user and one Python, and would report a worker that
fails to start nowhere but in a log of the head.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from pathlib import Path
from typing import Any

from wgpu_lora.cluster.cluster_file import ClusterFile, HostSpec
from wgpu_lora.cluster.launcher.files import PRIVATE_FOLDER, on_host, write_private
from wgpu_lora.cluster.launcher.ssh import node_command, user_of
from wgpu_lora.errors import UserError

PROVIDER = "wgpu_lora.cluster.launcher.provider.HostProvider"
# Of Ray's processes, after the port of the head: the cluster's `port` and those that follow it.
PORTS = ("gcs", "ray-client-server", "node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc",
         "dashboard-agent-listen", "metrics-export", "dashboard")  # fmt: skip


def ports_of(spec: ClusterFile) -> dict[str, int]:
    """The ports of Ray's processes by their names; `port` of the file leaves room for them."""
    return {name: spec.port + number for number, name in enumerate(PORTS)}


def address_of(spec: ClusterFile, host: HostSpec) -> str:
    """The IPv4 address by which the other hosts reach a host.

    Raises:
        UserError: there is none, or it is none that others could reach.
    """
    try:
        found = host.address or socket.gethostbyname(host.host)
    except OSError:
        raise UserError(
            f"{host.host} does not resolve to an IPv4 address here: give its 'address' in {spec.path}, that of the "
            "interface by which the other hosts reach it."
        ) from None
    parsed = ipaddress.ip_address(found)
    if parsed.version != 4:
        raise UserError(f"{host.host} has the address {found}: give an IPv4 'address', Ray's launcher needs one.")
    if parsed.is_loopback and len(spec.hosts) > 1:
        raise UserError(
            f"{host.host} resolves to {found}, which no other host reaches: give its 'address' in {spec.path}."
        )
    return found


def write_host(spec: ClusterFile, host: HostSpec, folder: Path, cluster_id: str, token: str) -> Path:
    """Write the configuration of `ray up` for a host and what it puts there; the configuration's path.

    Raises:
        UserError: an address cannot be used, or ssh names no user.
        OSError: the files cannot be written.
    """
    mounted = folder / "hosts" / host.host
    mounted.parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    node = {
        "cluster": spec.name,
        "id": cluster_id,
        "head": host == spec.head,
        "host": host.host,
        "address": address_of(spec, host),
        "head_address": address_of(spec, spec.head),
        "ports": ports_of(spec),
        "labels": dict(host.labels),
        "paths": spec.node_paths(host),
    }
    write_private(mounted / "node.json", json.dumps(node, indent=1))
    write_private(mounted / "token", token)
    config = folder / f"{host.host}.yaml"
    write_private(config, json.dumps(ray_config(spec, host, folder, mounted), indent=1))  # JSON is YAML
    return config


def ray_config(spec: ClusterFile, host: HostSpec, folder: Path, mounted: Path) -> dict[str, Any]:
    """The configuration of Ray's launcher for one host."""
    there = on_host(spec.name, host)
    return {
        "cluster_name": f"{spec.name}.{host.host}",
        "provider": {
            "type": "external",
            "module": PROVIDER,
            "host": {"host": host.host, "user": host.user, "ssh_key": host.ssh_key, "python": host.python},
            "state": str(folder / f"{host.host}.state"),
            "folder": there,
        },
        "auth": {"ssh_user": user_of(host)},  # no key: Ray would copy it to the host
        "available_node_types": {"host": {"node_config": {}, "resources": {}, "min_workers": 0, "max_workers": 0}},
        "head_node_type": "host",
        "max_workers": 0,
        "file_mounts": {there: str(mounted)},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [node_command(host, "start", there)],
        "worker_start_ray_commands": [],
    }
