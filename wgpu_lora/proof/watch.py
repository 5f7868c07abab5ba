"""What processes do, as a watcher sees it from outside and as each one's own witness writes when it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import cffi
import psutil

PERIOD = 0.2  # seconds between looks
LIBRARY = re.compile(r"\.so(\.|$)|\.dll$|\.dylib$", re.IGNORECASE)
LINUX = sys.platform.startswith("linux")
NO_MAPS = f"{sys.platform} does not let a process read which libraries another has mapped"
UNREADABLE = None if LINUX or hasattr(psutil.Process, "memory_maps") else NO_MAPS
LAUNCHES = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"}
OPENS = "ctypes.dlopen"
EVENTS = tuple(sorted(LAUNCHES | {OPENS}))
SHOWN = 4000  # characters of a word of a command; a shell's whole script is one word


def libraries(pid: int) -> set[str]:
    """Paths of a process's mapped libraries. Raises OSError or psutil.Error if it has ended or may not be read."""
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
    """Examines this process and all of its descendants repeatedly, from before the first child until after the last."""

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
                # Each time: between fork and exec, a child has its parent's command line.
                command = process.cmdline()
                found = self.seen.setdefault(process, Seen(process.pid, process.ppid(), command))
                found.command = command or found.command
                if not UNREADABLE and (mapped := libraries(process.pid)):
                    found.libraries |= mapped
                    found.looks += 1
            except (psutil.Error, OSError):
                continue  # it has ended


@contextmanager
def witness(path: str, heard: list[tuple[str, Sequence[Any]]]) -> Iterator[None]:
    """Around all of a child's work; writes its modules, libraries mapped and opened, and commands run to a file.

    heard: the list that an audit hook appends all EVENTS to.
    """
    dlopen = cffi.FFI.dlopen

    # cffi, by which wgpu opens its library, raises no audit event of its own.
    @wraps(dlopen)
    def heard_dlopen(ffi: Any, name: Any, *flags: Any) -> Any:
        heard.append((OPENS, (name,)))
        return dlopen(ffi, name, *flags)

    cffi.FFI.dlopen = heard_dlopen
    try:
        yield
    finally:
        cffi.FFI.dlopen = dlopen
        opened = {_text(a[0]) for event, a in heard if event == OPENS and isinstance(a[0], str | bytes)}
        account = {
            "pid": os.getpid(),
            "modules": sorted(sys.modules),
            "libraries": [] if UNREADABLE else sorted(libraries(os.getpid())),
            "opened": sorted(opened),
            "commands": [command_of(event, arguments) for event, arguments in heard if event in LAUNCHES],
        }
        Path(path).write_text(json.dumps(account))


def command_of(event: str, arguments: Sequence[Any]) -> list[str]:
    """The words of the command that an audit event starts, the program first."""
    if event == "os.system":
        return ["sh", "-c", _text(arguments[0])]
    if event == "os.startfile":
        return [_text(arguments[0])]
    program, words = arguments[1:3] if event == "os.spawn" else arguments[:2]
    if isinstance(words, str | bytes | os.PathLike):  # Windows takes a line
        words = shlex.split(_text(words), posix=False) if os.name == "nt" else [words]
    found = [_text(word) for word in words]
    return [_text(program), *found[1:]] if program else found


def _text(word: Any) -> str:
    return (os.fsdecode(word) if isinstance(word, str | bytes | os.PathLike) else str(word))[:SHOWN]
