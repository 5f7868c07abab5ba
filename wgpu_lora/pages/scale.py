"""Map values to positions between 0 and 1, with round numbers as ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

TICKS = 7  # at most, not counting the ends
APART = 0.09  # least distance of ticks, as a fraction of the axis, to be readable on a phone
TINY = 1e-300  # smaller numbers lose precision
DECADE = (1, 2, 5)
Ticks = list[tuple[float, str]]


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`; with a `unit`, logarithmic in 1 + value / unit, which has a position for 0.

    whole: show integer ticks only, for values such as steps.
    """

    low: float
    high: float
    unit: float | None = None
    whole: bool = False

    @classmethod
    def from_zero(cls, values: Iterable[float], log: bool = False) -> Scale:
        """From 0 to the largest of non-negative values; the unit of `log` is the smallest non-zero value."""
        found = [value for value in values if value > 0]
        whole = all(float(value).is_integer() for value in found)
        return cls(0.0, max(found, default=1.0), min(found, default=1.0) if log else None, whole)

    @classmethod
    def around(cls, values: Iterable[float]) -> Scale:
        """With round ends: from 0, unless the values are so close together that the line would look flat."""
        found = list(values) or [1.0]
        low, high = min(found), max(found)
        low = low if 0 < high < 2 * low else min(low, 0.0)
        step = _step(high - low or abs(high) or 1.0)
        low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
        return cls(low, high if high > low else low + step)

    def place(self, value: float) -> float:
        if self.unit is None:
            return (value - self.low) / (self.high - self.low)
        return math.log1p(value / self.unit) / math.log1p(self.high / self.unit)

    def ticks(self) -> Ticks:
        values = self._even() if self.unit is None else self._decades(self.unit)
        found: Ticks = []
        for value in values:
            place = round(self.place(value), 9)
            if not found or place - found[-1][0] >= APART:
                found.append((place, short(value)))
        return found

    def _even(self) -> list[float]:
        step = max(1.0 if self.whole else 0.0, _step(self.high - self.low))
        first = math.ceil(self.low / step - 1e-9)
        return [step * number for number in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _decades(self, unit: float) -> list[float]:
        first, last = math.floor(math.log10(unit)), math.floor(math.log10(self.high))
        factors = DECADE if last - first < 3 else (1,)
        found = (factor * 10.0**power for power in range(first, last + 1) for factor in factors)
        return [0.0, *(value for value in found if value <= self.high)]


def short(value: float) -> str:
    """Format a number briefly: 0.05, 2e-05, 900, 10k, 2.5M."""
    for suffix, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= max(factor, 1e4):
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.6g}"


def _step(span: float) -> float:
    """Distance of ticks: the smallest of 1, 2, 5, 10, 20, 50 ... that needs at most TICKS of them."""
    least = max(span / TICKS, TINY)
    scale = 10.0 ** math.floor(math.log10(least))
    return next(scale * factor for factor in (1, 2, 5, 10) if least <= scale * factor * (1 + 1e-9))
