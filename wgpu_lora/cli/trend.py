"""A line of small bars that shows how a loss has developed."""

from __future__ import annotations

import math
import statistics
from typing import Any

MOST = 48  # bars of a whole run
BARS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*#@"  # the latter for streams that cannot take the former


class Trend:
    """The means of equally many values each, at most MOST of them; memory does not grow with the run.

    stream: what the bars are written to, before rich replaces it by one that does not know its encoding.
    """

    def __init__(self, stream: Any) -> None:
        self._marks = BARS if _takes(stream, BARS) else PLAIN
        self._means: list[float] = []
        self._each, self._left = 1, list[float]()

    def add(self, value: float) -> None:
        """Add a value; those that are not finite are left out."""
        if not math.isfinite(value):
            return
        self._left.append(value)
        if len(self._left) < self._each:
            return
        self._means.append(statistics.fmean(self._left))
        self._left = []
        if len(self._means) > MOST:
            self._means = [statistics.fmean(self._means[i : i + 2]) for i in range(0, len(self._means) - 1, 2)]
            self._each *= 2

    def bars(self, width: int = MOST) -> str:
        """The last `width` bars; from the lowest to the highest of the values that they show."""
        means = self._means[-width:]
        if len(means) < 2:
            return ""
        low, high = min(means), max(means)
        steps = (len(self._marks) - 1) / ((high - low) or 1.0)
        return "".join(self._marks[round(steps * (mean - low))] for mean in means)


def _takes(stream: Any, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def hardware(line: Any) -> str:
    """The status of the hardware in a line of the log, as text."""
    units = {"gpu_busy": "{:.0f}% busy", "gpu_power": "{:.0f} W", "gpu_temperature": "{:.0f} °C"}
    return ", ".join(form.format(line[name]) for name, form in units.items() if name in line)
