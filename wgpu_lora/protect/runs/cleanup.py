"""The end of a protected session: what held keys or rows is overwritten, and what cannot be is listed.

It runs after success, failures, Ctrl-C and SIGTERM alike. After `kill -9` there is nothing to run it; then what is left
on disk is sealed, and the operating system has taken the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from wgpu_lora.gpu.buffer_wipe import WipeReport

Overwritable = bytearray | memoryview | np.ndarray

# Of any run: copies that neither this program nor the libraries that it uses can reach any more.
UNREACHABLE = (
    "texts of rows and keys, checkpoints and results in Python's immutable str and bytes objects, which are freed "
    "without being overwritten",
    "pieces of 8 KiB in which the age library gives out what it has opened",
    "copies of inputs, results and checked values that NumPy and Python freed before the end",
    "buffers through which wgpu and the driver stage writes to the device and reads from it",
    "memory of the tokenizer's process, which the operating system takes when it ends",
)


@dataclass(frozen=True)
class WipeFacts:
    """What a part of a cleanup did.

    Attributes:
        facts: numbers, such as `bytes`. not_wiped: what it could not overwrite, and why.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    not_wiped: Sequence[str] = ()


class Cleanup:
    """Parts to overwrite, in the order in which they were added, each whatever happens to the others."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, Callable[[], WipeFacts | None]]] = []

    def add(self, name: str, wipe: Callable[[], WipeFacts | None]) -> None:
        """Adds a part: what it is, in words, and what overwrites it."""
        self._parts.append((name, wipe))

    def run(self, unwipable: Iterable[str]) -> dict[str, Any]:
        """Overwrites all parts.

        Args:
            unwipable: what cannot be overwritten in this run, in words.

        Returns:
            `complete`, whether every part was overwritten whole; `wiped`, an object for each part that was, with `what`
            and its facts; `not_wiped`, sentences: parts that failed, then what cannot be overwritten.
        """
        wiped: list[dict[str, Any]] = []
        failed: list[str] = []
        for name, wipe in self._parts:
            try:
                result = wipe() or WipeFacts()
            except BaseException as error:  # what a library's panic is, too
                failed.append(f"{name}: {type(error).__name__}")  # its message might hold what must not be written
                continue
            failed += [f"{name}: {text}" for text in result.not_wiped]
            wiped.append({"what": name, **result.facts})
        return {"complete": not failed, "wiped": wiped, "not_wiped": [*failed, *unwipable, *UNREACHABLE]}


def overwrite(buffers: Iterable[Overwritable]) -> WipeFacts:
    """Overwrites buffers and arrays in the host's memory with zeros; those that are read-only are said not to be."""
    count = nbytes = readonly_count = 0
    for buffer in buffers:
        if not len(buffer):
            continue
        array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
        if not array.flags.writeable:
            readonly_count += 1
            continue
        array.fill(0)
        count, nbytes = count + 1, nbytes + array.nbytes
    readonly = [f"{readonly_count:,} of its buffers are read-only"] if readonly_count else []
    return WipeFacts({"buffers": count, "bytes": nbytes}, readonly)


def device_wipe_facts(report: WipeReport) -> WipeFacts:
    """What `gpu.buffer_wipe` says, as facts."""
    facts = asdict(report) | {"verified": report.verified, "seconds": round(report.seconds, 3)}
    return WipeFacts(facts, facts.pop("not_wiped"))
