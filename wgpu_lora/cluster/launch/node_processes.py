"""The processes of a cluster on this host: found by a mark in their environment, which all of them inherit."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil

MARK = "WGPU_LORA_CLUSTER_NODE"  # <cluster>/<id of this start>
SETTINGS = {  # of Ray, wherever we start it
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",  # a busy machine takes more than Ray's 30
    "RAY_worker_niceness": "0",  # Ray's own is 15; jobs train here as fast as `finetune` would
    "PYTHONSAFEPATH": "1",  # Ray's own processes import nothing from the folder that it is started in
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # Ray's client server forks while its other threads use gRPC
}
SECONDS = 10.0  # until killed processes have ended
ROUNDS = 5


def environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This program's environment, changed; None removes a variable, such as a token that goes before a file's."""
    variables = {**os.environ, **changes}
    return {name: value for name, value in variables.items() if value is not None}


def of_cluster(name: str) -> dict[int, psutil.Process]:
    """This user's processes of a cluster, with all that they started."""
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if _mark(process).startswith(f"{name}/"):
            processes[process.pid] = process
            with suppress(psutil.Error):
                processes.update({child.pid: child for child in process.children(recursive=True)})
    return {pid: process for pid, process in processes.items() if pid != os.getpid() and _alive(process)}


def start_id(name: str) -> str | None:
    """The id of the start of a cluster whose node runs here; None if none does."""
    for process in of_cluster(name).values():
        with suppress(psutil.Error):
            if process.name() == "raylet":
                return _mark(process).partition("/")[2] or None
    return None


def end(name: str) -> list[str]:
    """Kill all processes of a cluster here; the titles of those that are still there.

    Checkpoints are in the store, and Ray's own processes keep nothing, but take half a minute if they are asked.
    """
    for _ in range(ROUNDS):  # some may be started while others are ended
        processes = of_cluster(name).values()
        if not processes:
            return []
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        last = time.monotonic() + SECONDS
        while time.monotonic() < last and any(map(_alive, processes)):
            time.sleep(0.05)
    return [title(process) for process in of_cluster(name).values()]


def _alive(process: psutil.Process) -> bool:
    """Whether it has not ended; one that only its parent has not noticed yet has."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def listening(name: str) -> list[dict[str, Any]]:
    """The TCP ports on which processes of a cluster listen here: `process`, `address` (`*`: all interfaces), `port`."""
    listeners = {}
    for process in of_cluster(name).values():
        with suppress(psutil.Error):
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr:
                    address = (
                        "*" if connection.laddr.ip in ("::", "0.0.0.0") else connection.laddr.ip.removeprefix("::ffff:")
                    )
                    listeners[connection.laddr.port, address] = title(process)
    return [
        {"process": title, "address": address, "port": port} for (port, address), title in sorted(listeners.items())
    ]


def addresses() -> list[str]:
    """The IP addresses of this host's interfaces."""
    entries = [entry for interface in psutil.net_if_addrs().values() for entry in interface]
    return sorted(
        {entry.address.partition("%")[0] for entry in entries if entry.family.name in ("AF_INET", "AF_INET6")}
    )


def public(ips: list[str]) -> list[str]:
    """Those addresses that can be reached from the Internet, unless a firewall forbids it."""
    return [ip for ip in ips if ipaddress.ip_address(ip).is_global]


def title(process: psutil.Process) -> str:
    """A process in a word: its module, its script or its program."""
    try:
        line = process.cmdline() or ["?"]
    except psutil.Error:
        return str(process.pid)
    if "-m" in line[:-1]:
        return str(line[line.index("-m") + 1])
    return os.path.basename(str(next((word for word in line[1:3] if word.endswith(".py")), line[0])))[:60]


def _mark(process: psutil.Process) -> str:
    try:
        return str(process.environ().get(MARK, ""))
    except (psutil.Error, OSError):  # another user's, or it has ended
        return ""
