"""Repeated timings and their spread."""

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
        """The statistics of at least one run."""
        p20, median, p80 = np.percentile(seconds, [20, 50, 80])
        return cls(float(median), float(p20), float(p80), variation(seconds), len(seconds))


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """The spread of values. variance: of the sample (n - 1). cv: standard deviation over the mean.

    Both are None if there is one value, cv also if the mean is 0.
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
    """The coefficient of variation; 0 if there is one value."""
    return spread(values)["cv"] or 0.0


def run_seconds(work: Callable[[], object]) -> float:
    """The time of a call in seconds, by the host's clock."""
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
    """Call `run`, which returns seconds, at least `iterations` times, and then until their variation is below `cv` or
    `limit` seconds have passed by the clock."""
    seconds: list[float] = []
    begin = clock()
    while len(seconds) < iterations or (variation(seconds) >= cv and clock() - begin < limit):
        seconds.append(run())
    return seconds
