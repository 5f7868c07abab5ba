"""Repeated timings, when there are enough of them, and how far values lie apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Timings:
    """Seconds of repeated runs: their median, the 20th and 80th percentiles, and the coefficient of variation."""

    seconds: float
    p20: float
    p80: float
    cv: float
    iterations: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timings:
        """Of at least one run."""
        p20, median, p80 = np.percentile(seconds, [20, 50, 80])
        return cls(float(median), float(p20), float(p80), variation(seconds), len(seconds))


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """How far values lie apart: variance is the sample's (n - 1), cv the deviation over the mean.

    Both are None where there is one value, which says nothing of spread; cv also where the mean is 0.
    """
    mean = statistics.fmean(values)
    variance = statistics.variance(values) if len(values) > 1 else None
    return {
        "median": statistics.median(values),
        "mean": mean,
        "min": min(values),
        "max": max(values),
        "variance": variance,
        "cv": None if variance is None or mean == 0 else variance**0.5 / abs(mean),
    }


def variation(values: Sequence[float]) -> float:
    """The coefficient of variation; 0 where one value has nothing to vary from."""
    return spread(values)["cv"] or 0.0


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call by the host's clock."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


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
