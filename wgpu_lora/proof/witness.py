"""What a child process says of itself when it ends: modules, libraries mapped and opened, commands run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import cffi

from wgpu_lora.proof.maps import libraries, unreadable

LAUNCHES = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"}
OPENS = "ctypes.dlopen"
EVENTS = tuple(sorted(LAUNCHES | {OPENS}))
SHOWN = 4000  # characters of a word of a command; a shell's whole script is one
Heard = list[tuple[str, Sequence[Any]]]


class Witness:
    """Around the whole of a child's work: what is run or opened is heard as it happens, so that nothing is too short.

    heard: where a hook that was there before this module keeps EVENTS; left out, they are heard from here on.
    """

    def __init__(self, path: str, heard: Heard | None = None):
        self.path = Path(path)
        self.heard: Heard = [] if heard is None else heard
        self._late = heard is None
        self._dlopen = cffi.FFI.dlopen

    def __enter__(self) -> Witness:
        if self._late:
            sys.addaudithook(self._hear)

        # cffi, which wgpu opens its library by, raises no event of its own.
        @wraps(self._dlopen)
        def dlopen(ffi: Any, name: Any, *flags: Any) -> Any:
            self._hear(OPENS, (name,))
            return self._dlopen(ffi, name, *flags)

        cffi.FFI.dlopen = dlopen
        return self

    def __exit__(self, *exception: object) -> None:
        cffi.FFI.dlopen = self._dlopen
        said = {
            "pid": os.getpid(),
            "modules": sorted(sys.modules),
            "libraries": [] if unreadable() else sorted(libraries(os.getpid())),
            "opened": sorted(
                {_text(a[0]) for event, a in self.heard if event == OPENS and isinstance(a[0], str | bytes)}
            ),
            "commands": [command_of(event, a) for event, a in self.heard if event in LAUNCHES],
        }
        self.path.write_text(json.dumps(said))

    def _hear(self, event: str, arguments: Sequence[Any]) -> None:
        if event in EVENTS:
            self.heard.append((event, arguments))


def command_of(event: str, arguments: Sequence[Any]) -> list[str]:
    """The words of what an audit event starts, the program first."""
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
