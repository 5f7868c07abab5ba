"""Identify processes and whether they still run: pids are reused, so start times and boot ids count too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

FIRST_PIDS = "pid:[4026531836]"  # Linux's initial pid namespace, a constant of the kernel
ENDED = ("Z", "X")  # states of a dead process that is still listed


@cache
def host_id() -> str:
    """Identifies the set of pids visible to this process: the host name, and in a container its pid namespace."""
    with suppress(OSError):
        if (pids := os.readlink("/proc/self/ns/pid")) != FIRST_PIDS:
            return f"{socket.gethostname()} {pids}"
    return socket.gethostname()


@cache
def boot_id() -> str:
    """Identifies this boot of the machine, containers included; "" on Windows, where start times suffice."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if sys.platform == "linux":
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def process_start(pid: int) -> int | None:
    """Start time of a process of this host, in a system-specific unit; None if no process with this pid is running.

    On Linux in ticks since boot, which do not change when the clock is set; elsewhere in milliseconds since 1970.
    """
    if sys.platform == "linux":
        try:
            # The fields after the name (which may contain anything): state, ..., threads, ..., start.
            facts = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The first thread may have ended while others still keep the process's files and memory.
        return None if facts[0] in ENDED and int(facts[17]) <= 1 else int(facts[19])
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1000)
    except psutil.NoSuchProcess:
        return None
