"""A training step that two programs take, their results side by side, and the memory of a process."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

Record = dict[str, Any]


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


def compared(found: Mapping[str, Record], tokens: int, reference: str) -> list[Record]:
    """A row for each side: median seconds, tokens/s, and its speed as a share of the reference side's."""
    medians = {name: statistics.median(side["seconds"]) for name, side in found.items() if side.get("seconds")}
    rows = []
    for name, side in found.items():
        rows.append({"side": name, **side})
        if seconds := medians.get(name):
            ratio = medians[reference] / seconds if reference in medians else None
            rows[-1] |= {"step_seconds": seconds, "tokens_per_second": tokens / seconds, "ratio": ratio}
            rows[-1]["steps"] = len(side["seconds"])
    return rows


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
