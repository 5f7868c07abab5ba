"""What a child process says of itself when it ends: modules, libraries mapped and opened, commands run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import cffi

from wgpu_lora.proof.watch import UNREADABLE, libraries

LAUNCHES = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"}
OPENS = "ctypes.dlopen"
EVENTS = tuple(sorted(LAUNCHES | {OPENS}))
SHOWN = 4000  # characters of a word of a command; a shell's whole script is one word


@contextmanager
def witness(path: str, heard: list[tuple[str, Sequence[Any]]]) -> Iterator[None]:
    """Around all of a child's work. heard: the list that an audit hook appends all EVENTS to."""
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
