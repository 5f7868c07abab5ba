"""Looks at this process and all of its descendants repeatedly while they run."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PERIOD = 0.2  # seconds between looks
LIBRARY = re.compile(r"\.so(\.|$)|\.dll$|\.dylib$", re.IGNORECASE)
LINUX = sys.platform.startswith("linux")
NO_MAPS = f"{sys.platform} does not let a process read which libraries another has mapped"
UNREADABLE = None if LINUX or hasattr(psutil.Process, "memory_maps") else NO_MAPS


def libraries(pid: int) -> set[str]:
    """Paths of a process's mapped libraries. Raises OSError or psutil.Error if it has ended or is not ours."""
    if LINUX:  # without psutil, which takes ten times as long because it also sums up every mapping's memory
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    else:
        paths = {region.path for region in psutil.Process(pid).memory_maps()}
    return {path for path in paths if LIBRARY.search(path.removesuffix(" (deleted)"))}


@dataclass
class Seen:
    """A process: its command line, all libraries that were ever mapped, and how many looks found any."""

    pid: int
    parent: int
    command: list[str]
    libraries: set[str] = field(default_factory=set)
    looks: int = 0


class Watcher(threading.Thread):
    """To be started before the first child, and stopped after the last."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: dict[psutil.Process, Seen] = {}
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.is_set():
            self.look()
            self._done.wait(PERIOD)

    def stop(self) -> list[Seen]:
        self._done.set()
        if self.is_alive():
            self.join()
        return list(self.seen.values())

    def look(self) -> None:
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            try:
                # Again at each look: between fork and exec, a child has its parent's command line.
                command = process.cmdline()
                found = self.seen.setdefault(process, Seen(process.pid, process.ppid(), command))
                found.command = command or found.command
                if not UNREADABLE and (mapped := libraries(process.pid)):
                    found.libraries |= mapped
                    found.looks += 1
            except (psutil.Error, OSError):
                continue  # it has ended
