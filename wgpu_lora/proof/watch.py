"""Looks at this process and all of its descendants again and again while they run."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import psutil

from wgpu_lora.proof.maps import libraries, unreadable

PERIOD = 0.2  # seconds between looks


@dataclass
class Seen:
    """A process: its command line, every library that was mapped at some look, and how many looks found any."""

    pid: int
    parent: int
    command: list[str]
    libraries: set[str] = field(default_factory=set)
    looks: int = 0


class Watcher(threading.Thread):
    """Start it before the first child, and `stop` it after the last."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: dict[tuple[int, float], Seen] = {}
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
                # Again at each look: between fork and exec a child has its parent's command line.
                command = process.cmdline()
                key = (process.pid, process.create_time())
                found = self.seen.setdefault(key, Seen(process.pid, process.ppid(), command))
                found.command = command or found.command
                if not unreadable() and (mapped := libraries(process.pid)):
                    found.libraries |= mapped
                    found.looks += 1
            except (psutil.Error, OSError):
                continue  # ended meanwhile
