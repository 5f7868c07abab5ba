"""What keeps a process's memory off the disk: no core dumps, and memory that is locked against swapping.

After POSIX.1-2024 (setrlimit, mlock, mlockall), prctl(2), core(5) and mlockall(2) of Linux, VirtualLock and WerSetFlags
of Windows.
What a system does not allow is listed in the facts, and nothing else fails because of it.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

LINUX, WINDOWS = sys.platform == "linux", sys.platform == "win32"
PR_GET_DUMPABLE, PR_SET_DUMPABLE = 3, 4
MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4
CAP_IPC_LOCK = 14
WHOLE_RANGE = 0xFFFFFFFF  # of user ids: that of the namespace in which the system started
WER_NO_HEAP = 1  # WER_FAULT_REPORTING_FLAG_NOHEAP


@dataclass
class HostProtection:
    """What `harden` did.

    Attributes:
        facts: `core_dumps`, `memory` and `swap`, what was turned off or locked and why not; `not_protected`, sentences.
    """

    facts: dict[str, Any]
    _undo: list[Callable[[], object]] = field(default_factory=list, repr=False)

    def restore(self) -> None:
        """Sets everything back as it was: for measurements and tests, where one process does both."""
        while self._undo:
            self._undo.pop()()


def harden() -> HostProtection:
    """Turns core dumps off, for children too, and locks the memory of this process if the system allows it.

    Memory is locked with MCL_ONFAULT: each page when it is first used, so that files are not read as a whole. Where
    there is a limit (RLIMIT_MEMLOCK), allocations beyond it would fail; then only data keys are locked (`lock_pages`).
    """
    environment_at_start()  # a process that leaves no core dumps can no longer read it, unless it is root's
    protection = HostProtection({})
    protection.facts["core_dumps"] = _no_core_dumps(protection)
    protection.facts["memory"] = _lock_memory(protection)
    protection.facts["swap"] = swap_devices()
    protection.facts["not_protected"] = list(_not_protected(protection.facts))
    return protection


@cache
def environment_at_start() -> dict[str, str]:
    """The variables with which the process was started: as Linux keeps them, since a preloaded library can remove its
    own, or, where that cannot be read, as Python found them."""
    variables: dict[bytes, bytes] = {}
    if os.name == "posix":
        import posix

        variables = posix.environ  # a snapshot, unlike os.environ
    try:
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        lines = []
    pairs = [*variables.items(), *(line.split(b"=", 1) for line in lines if b"=" in line)]
    return {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}


def lock_pages(address: int, size: int) -> bool:
    """Locks the pages that hold these bytes in memory (mlock, VirtualLock); whether the system allowed it."""
    system, at, length = system_library(), ctypes.c_void_p(address), ctypes.c_size_t(size)
    return bool(system.VirtualLock(at, length)) if WINDOWS else system.mlock(at, length) == 0


def system_library() -> Any:
    """The C library of the process, or kernel32 on Windows."""
    if WINDOWS:
        return ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    return ctypes.CDLL(None, use_errno=True)


def system_file(path: str) -> str:
    """The content of a file in which Linux describes itself; empty if there is none."""
    try:
        return Path(path).read_text()
    except (OSError, ValueError):
        return ""


def swap_devices() -> list[str] | None:
    """Files and devices to which Linux can swap; None where that is not known."""
    heading, *lines = system_file("/proc/swaps").splitlines() or [""]
    return [line.split()[0] for line in lines if line.strip()] if heading else None


def _no_core_dumps(protection: HostProtection) -> dict[str, Any]:
    if WINDOWS:
        return {"off": False, "heap_left_out": system_library().WerSetFlags(WER_NO_HEAP) == 0}
    import resource

    facts: dict[str, Any] = {}
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    # Linux ignores any limit but 1 byte where a program receives dumps (fs/coredump.c); files need more than that, too.
    limit = 1 if LINUX and hard else 0
    resource.setrlimit(resource.RLIMIT_CORE, (limit, hard))
    protection._undo.append(lambda: resource.setrlimit(resource.RLIMIT_CORE, (soft, hard)))
    facts["limit_bytes"] = resource.getrlimit(resource.RLIMIT_CORE)[0]
    facts["off"] = facts["limit_bytes"] <= 1
    if LINUX:  # children that are other programs do not inherit this, but the limit
        system, before = system_library(), system_library().prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)
        system.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        protection._undo.append(lambda: system.prctl(PR_SET_DUMPABLE, before, 0, 0, 0))
        facts["dumpable"] = bool(system.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0))
        facts["off"] = facts["off"] and not facts["dumpable"]
        facts["core_pattern"] = system_file("/proc/sys/kernel/core_pattern").strip()
    return facts


def _lock_memory(protection: HostProtection) -> dict[str, Any]:
    """`locked`: "all" of the process's memory, or "data keys"."""
    if not LINUX:
        return {"locked": "data keys", "why": f"{sys.platform} has no way to lock all memory of a process"}
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        protection._undo.append(lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard)))
    facts: dict[str, Any] = {"limit_bytes": None if hard == resource.RLIM_INFINITY else hard}
    if facts["limit_bytes"] is not None and not _may_lock():
        return {**facts, "locked": "data keys", "why": f"RLIMIT_MEMLOCK is {hard:,} bytes, and CAP_IPC_LOCK is missing"}
    system = system_library()
    if system.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT):
        return {**facts, "locked": "data keys", "why": f"mlockall: {os.strerror(ctypes.get_errno())}"}
    protection._undo.append(system.munlockall)
    return {**facts, "locked": "all", "how": "mlockall: each page when it is first used"}


def _may_lock() -> bool:
    """Whether Linux ignores the limit of locked memory: with CAP_IPC_LOCK, in the first user namespace."""
    capabilities = re.search(r"^CapEff:\s*(\w+)", system_file("/proc/self/status"), re.MULTILINE)
    ranges = system_file("/proc/self/uid_map").split()
    has_capability = bool(capabilities and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1)
    return has_capability and ranges == ["0", "0", str(WHOLE_RANGE)]


def _not_protected(facts: dict[str, Any]) -> Iterator[str]:
    if not facts["core_dumps"]["off"]:
        yield "core dumps of this process are not turned off"
    dumps = facts["core_dumps"]
    if dumps.get("core_pattern", "").startswith("@" if dumps.get("limit_bytes") else ("|", "@")):
        yield "core dumps of child processes are given to what core_pattern names"
    yield from swap_risks(facts)
    yield "whoever controls this machine's kernel can read the memory of this process"


def swap_risks(facts: dict[str, Any]) -> Iterator[str]:
    """What of the memory can reach the disk, by the facts of `harden`."""
    if facts["memory"]["locked"] != "all" and facts["swap"] != []:
        unknown = " (whether there is swap is not known)" if facts["swap"] is None else ""
        yield f"rows, weights and signing keys in memory can be swapped out{unknown}: {facts['memory']['why']}"
    if facts["swap"] != []:
        yield "hibernation writes all memory to the swap, also what is locked"
        yield "memory of child processes, such as the tokenizer's, can be swapped out"
