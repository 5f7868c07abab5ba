"""What tests of the confined process share: attacks are answers whose function `attack` is called."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from wgpu_lora.processes import seccomp
from wgpu_lora.train.checks.sandbox import plain_data
from wgpu_lora.train.checks.sandbox.sandbox_process import LISTENER, SandboxProcess

confined = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in seccomp.ARCHITECTURES,
    reason="needs Linux on x86-64 or arm64: nothing is confined elsewhere",
)
# Python's audit hook taken away, as an attack would, so that the kernel's means stand alone.
UNGUARDED = (
    "import sys; sys.path.append(sys.argv.pop(1)); from wgpu_lora.train.checks.sandbox import sandbox_child as child; "
    "child._guard = lambda: None; child.main()"
)
# For an answer: `tried` tries many things by name and says what came of each, in place of raising.
TRY = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def tried(**attempts):
    said = {}
    for name, attempt in attempts.items():
        try:
            said[name] = repr(attempt())[:200]
        except BaseException as error:
            said[name] = None
    return {name: what for name, what in said.items() if what is not None}
def sys_(number, *args):
    ctypes.set_errno(0)
    if libc.syscall(ctypes.c_long(number), *args) == -1:
        raise OSError(ctypes.get_errno(), "")
    return "done"
"""


def returned(code: str, *args: Any, timeout: float = 10.0) -> Any:
    """What the function `attack` of an answer returns."""
    with SandboxProcess(code, timeout, False) as process:
        process.send(code, [("attack", plain_data.dump(list(args)), plain_data.dump({}))])
        assert process.next() == ("parsed", "")
        kind, value = process.next()
    assert kind == "value", value
    return plain_data.load(value)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Sees to it that afterwards there are no processes, pipes, listening threads and files that were not there before.

    No other descriptors and threads are looked at: those of libraries that earlier tests used come and go.
    """
    places = [Path("/tmp"), Path("/dev/shm"), Path.cwd(), Path.home()]

    def descriptors() -> set[object]:
        links = {os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")}
        pipes = {link for link in links if Path(link).name.startswith("pipe:")}
        return pipes | {thread for thread in threading.enumerate() if thread.name == LISTENER}

    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True)}

    names_before, descriptors_before = [set(os.listdir(place)) for place in places], descriptors()
    processes = children()
    yield
    assert children() <= processes
    assert not descriptors() - descriptors_before
    for place, before in zip(places, names_before, strict=True):
        names = set(os.listdir(place)) - before
        assert not [name for name in names if "attack" in name or name.startswith("wgpu-lora-check-")]


def blocks(text: str) -> dict[str, str]:
    """Pieces of code by name: each follows a line of ### and its name."""
    pieces = [piece.partition("\n") for piece in text.split("### ")[1:]]
    return {name: code for name, _, code in pieces}
