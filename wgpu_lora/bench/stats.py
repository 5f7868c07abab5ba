"""Repeated timings, and when there are enough of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Timings:
    """Seconds of repeated runs: their median, the 20th and 80th percentiles, and the coefficient of variation."""

    median: float
    p20: float
    p80: float
    cv: float  # standard deviation over mean
    iterations: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timings:
        """Of at least one run."""
        p20, median, p80 = np.percentile(seconds, [20, 50, 80])
        return cls(float(median), float(p20), float(p80), variation(seconds), len(seconds))


def variation(seconds: list[float]) -> float:
    """The coefficient of variation of a sample; 0 where one run has nothing to vary from."""
    return statistics.stdev(seconds) / statistics.fmean(seconds) if len(seconds) > 1 and any(seconds) else 0.0


def repeat(
    run: Callable[[], float],
    iterations: int,
    cv: float,
    limit: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Calls `run` for its seconds at least `iterations` times, then until they vary by less than `cv`.

    `limit` bounds the wall-clock seconds: past it, nothing is asked for beyond the first `iterations`.
    """
    seconds: list[float] = []
    begin = clock()
    while len(seconds) < iterations or (variation(seconds) >= cv and clock() - begin < limit):
        seconds.append(run())
    return seconds
