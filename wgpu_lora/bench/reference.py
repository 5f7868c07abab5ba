"""A comparison of training steps with another program: the work, the results, and the memory of a process."""

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
    """A step of `rows` rows of `tokens` tokens, with a loss on every token and adapters on all linear layers.

    base_dtype: storage type of the frozen weights. compute_dtype: of our products' inputs.
    """

    shape: str
    layers: int | None
    rows: int
    tokens: int
    rank: int
    base_dtype: str
    device: str | int | None = None
    compute_dtype: str = "f32"


def compared(found: Mapping[str, Record], tokens: int, reference: str) -> list[Record]:
    """A row per side: median time of a step, tokens/s, and its speed relative to the reference side, if that ran."""
    medians = {name: statistics.median(side["seconds"]) for name, side in found.items() if "not_run" not in side}
    rows = [{"side": name, **side} for name, side in found.items()]
    for row in rows:
        if seconds := medians.get(row["side"]):
            ratio = medians[reference] / seconds if reference in medians else None
            row |= {"step_seconds": seconds, "tokens_per_second": tokens / seconds, "ratio": ratio}
            row["steps"] = len(row["seconds"])
    return rows


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def forget_peak() -> None:
    """Reset `peak_resident_bytes`, where the system (Linux) can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """The maximum memory of this process so far."""
    status = Path("/proc/self/status")
    if status.is_file() and (match := re.search(r"VmHWM:\s+(\d+)", status.read_text())):
        return 1024 * int(match[1])
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
