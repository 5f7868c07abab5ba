"""A training step that two programs take, and the memory of a process."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class ReferenceWork:
    """A step of `rows` rows of `tokens` tokens, every token trained, all projections adapted.

    base_dtype: of the side's own frozen weights.
    """

    shape: str
    layers: int | None
    rows: int
    tokens: int
    rank: int
    base_dtype: str
    device: str | None = None


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def forget_peak() -> None:
    """From now on, `peak_resident_bytes` is of what follows; if the system cannot do that, of all before too."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """The most memory that this process has held."""
    status = Path("/proc/self/status")
    if status.is_file() and (found := re.search(r"VmHWM:\s+(\d+)", status.read_text())):
        return 1024 * int(found[1])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
