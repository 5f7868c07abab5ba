"""Line charts for chart.html.j2: an SVG that stretches, with labels outside of it that do not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

SIDE = 1000  # units of the SVG's square view box
COLUMNS = 250  # that lines are thinned to
FEW, MANY = 40, 200  # most points of a line that are drawn as labelled dots, by default and if `marked`
COLOURS = 8  # in base.html.j2
LARGEST = 1e300  # largest value drawn, so that differences stay finite; NaN is left out too
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line to draw.

    style: `line`, `faint`, `dashed`, or `points` for dots alone; marked: draw up to MANY points as dots, instead of up
    to FEW.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    style: str = "line"
    marked: bool = False


@dataclass(frozen=True)
class Drawn:
    """A line in SVG units. dots: (x, y, label) of each marked point."""

    name: str
    colour: int
    style: str
    path: str
    dots: list[tuple[str, str, str]]


@dataclass(frozen=True)
class Chart:
    """A laid-out chart. x_ticks, y_ticks: (per cent from the left or the top, text)."""

    lines: list[Drawn]
    x_label: str
    y_label: str
    x_ticks: list[tuple[str, str]]
    y_ticks: list[tuple[str, str]]


def line_chart(lines: Sequence[Series], x_label: str, y_label: str, log: bool = False) -> Chart:
    """Lay out several lines in one chart; x begins at 0, and non-finite points are left out.

    Args:
        log: use a logarithmic x axis.
    """
    curves = [(line, [p for p in line.points if all(abs(value) <= LARGEST for value in p)]) for line in lines]
    across = Scale.from_zero((x for _, points in curves for x, _ in points), log)
    up = Scale.around(y for _, points in curves for _, y in points)
    paths = [_draw(line, points, across, up, x_label) for line, points in curves if points]
    return Chart(paths, x_label, y_label, _percent(across.ticks()), _percent([(1 - at, t) for at, t in up.ticks()]))


def _draw(line: Series, points: Sequence[Point], across: Scale, up: Scale, x_label: str) -> Drawn:
    positions = [(across.position(x), 1 - up.position(y)) for x, y in points]
    path = "L".join(f"{_number(x)} {_number(y)}" for x, y in thinned(positions))
    dots = []
    if line.style != "faint" and len(points) <= (MANY if line.marked else FEW):
        for (x, y), (at, value) in zip(positions, points, strict=True):
            dots.append((_number(x), _number(y), f"{line.name}: {value:.4g} ({x_label} {at:,.6g})"))
    return Drawn(line.name, line.colour % COLOURS, line.style, f"M{path}", dots)


def thinned(positions: Sequence[Point]) -> list[Point]:
    """Thin out points to the lowest and the highest of each column, and the ends, in order."""
    if len(positions) <= 2 * COLUMNS:
        return list(positions)
    columns: dict[int, list[int]] = {}
    for number, (x, _) in enumerate(positions):
        columns.setdefault(int(x * COLUMNS), []).append(number)
    indices = {0, len(positions) - 1}
    for numbers in columns.values():
        indices |= {min(numbers, key=lambda n: positions[n][1]), max(numbers, key=lambda n: positions[n][1])}
    return [positions[number] for number in sorted(indices)]


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """Moving average over `window` points, over fewer at the ends."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    half, count = window // 2, len(points)
    spans = [(max(0, i - half), min(count, i + half + 1)) for i in range(count)]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, spans, strict=True)]


def parts(values: Iterable[float], whole: float) -> list[tuple[str, str]]:
    """(start, width) of each part of a bar of length `whole`, in SVG units."""
    edges = [0.0]
    for value in values:
        edges.append(edges[-1] + (value / whole if whole else 0.0))
    return [(_number(a), _number(b - a)) for a, b in pairwise(edges)]


def _number(share: float) -> str:
    return f"{SIDE * share:.1f}".removesuffix(".0")


def _percent(ticks: Ticks) -> list[tuple[str, str]]:
    return [(f"{100 * at:.2f}", text) for at, text in ticks]


TICKS = 7  # at most, not counting the ends
TICK_DISTANCE = 0.09  # least distance of ticks, as a fraction of the axis, to be readable on a phone
TINY = 1e-300  # smaller numbers lose precision
DECADE = (1, 2, 5)
Ticks = list[tuple[float, str]]


@dataclass(frozen=True)
class Scale:
    """An axis from `minimum` to `maximum`; with a `unit`, logarithmic in 1 + value / unit, which has a position for 0.

    whole: show integer ticks only, for values such as steps.
    """

    minimum: float
    maximum: float
    unit: float | None = None
    whole: bool = False

    @classmethod
    def from_zero(cls, values: Iterable[float], log: bool = False) -> Scale:
        """From 0 to the largest of non-negative values; the unit of `log` is the smallest non-zero value."""
        result = [value for value in values if value > 0]
        whole = all(float(value).is_integer() for value in result)
        return cls(0.0, max(result, default=1.0), min(result, default=1.0) if log else None, whole)

    @classmethod
    def around(cls, values: Iterable[float]) -> Scale:
        """With round ends: from 0, unless the values are so close together that the line would look flat."""
        result = list(values) or [1.0]
        minimum, maximum = min(result), max(result)
        minimum = minimum if 0 < maximum < 2 * minimum else min(minimum, 0.0)
        step = _step(maximum - minimum or abs(maximum) or 1.0)
        minimum, maximum = step * math.floor(minimum / step + 1e-9), step * math.ceil(maximum / step - 1e-9)
        return cls(minimum, maximum if maximum > minimum else minimum + step)

    def position(self, value: float) -> float:
        if self.unit is None:
            return (value - self.minimum) / (self.maximum - self.minimum)
        return math.log1p(value / self.unit) / math.log1p(self.maximum / self.unit)

    def ticks(self) -> Ticks:
        values = self._even() if self.unit is None else self._decades(self.unit)
        result: Ticks = []
        for value in values:
            position = round(self.position(value), 9)
            if not result or position - result[-1][0] >= TICK_DISTANCE:
                result.append((position, short(value)))
        return result

    def _even(self) -> list[float]:
        step = max(1.0 if self.whole else 0.0, _step(self.maximum - self.minimum))
        first = math.ceil(self.minimum / step - 1e-9)
        return [step * number for number in range(first, math.floor(self.maximum / step + 1e-9) + 1)]

    def _decades(self, unit: float) -> list[float]:
        first, last = math.floor(math.log10(unit)), math.floor(math.log10(self.maximum))
        factors = DECADE if last - first < 3 else (1,)
        result = (factor * 10.0**power for power in range(first, last + 1) for factor in factors)
        return [0.0, *(value for value in result if value <= self.maximum)]


def short(value: float) -> str:
    """Format a number briefly: 0.05, 2e-05, 900, 10k, 2.5M."""
    for suffix, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= max(factor, 1e4):
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.6g}"


def _step(span: float) -> float:
    """Distance of ticks: the smallest of 1, 2, 5, 10, 20, 50 ... that needs at most TICKS of them."""
    min_step = max(span / TICKS, TINY)
    scale = 10.0 ** math.floor(math.log10(min_step))
    return next(scale * factor for factor in (1, 2, 5, 10) if min_step <= scale * factor * (1 + 1e-9))
