"""Which process this is, and whether another still runs: pids are used again, so start times and boots count too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

FIRST_PIDS = "pid:[4026531836]"  # the pid namespace that Linux starts with, a constant of the kernel
ENDED = ("Z", "X")  # states of a process that is still listed


@cache
def host_id() -> str:
    """Names the set of pids that this process sees: the host, and in a container its pid namespace as well."""
    with suppress(OSError):
        if (pids := os.readlink("/proc/self/ns/pid")) != FIRST_PIDS:
            return f"{socket.gethostname()} {pids}"
    return socket.gethostname()


@cache
def boot_id() -> str:
    """Names this start of this machine, containers included; empty on Windows, whose start times tell it anyway."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if sys.platform == "linux":
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def start_of(pid: int) -> int | None:
    """When a process of this host started, in a unit of the system's own; None where none of this pid is running.

    On Linux ticks since the boot, since the time of day at which a process started moves when the clock is set;
    elsewhere milliseconds since 1970.
    """
    if sys.platform == "linux":
        try:
            # After the name, which may hold anything, come the state, ..., the threads, ..., the start.
            facts = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The first thread can have ended while others, ending too, keep the process's files and memory.
        return None if facts[0] in ENDED and int(facts[17]) <= 1 else int(facts[19])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1000)
    except psutil.NoSuchProcess:
        return None
