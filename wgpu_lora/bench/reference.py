"""The same work for two programs, and what became of it; worker/turns.py has them take turns."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

Record = dict[str, Any]
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class ReferenceWork:
    """A training step that both sides take: `rows` rows of `tokens` tokens, every token trained, all projections.

    base_dtype: what the side's own frozen weights are.
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
    speeds = {name: tokens / statistics.median(side["seconds"]) for name, side in found.items() if side.get("seconds")}
    rows = []
    for name, side in found.items():
        row = {"side": name, **side}
        if name in speeds:
            ratio = speeds[name] / speeds[reference] if reference in speeds else None
            row |= {"step_seconds": statistics.median(side["seconds"]), "tokens_per_second": speeds[name]}
            row |= {"ratio": ratio, "steps": len(side["seconds"])}
        rows.append(row)
    return rows


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def forget_peak() -> None:
    """From now on, `peak_resident_bytes` is of what comes; where the system cannot do that, of all before too."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """The most memory that this process has held."""
    if STATUS.is_file():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def timed_steps(run: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return seconds
