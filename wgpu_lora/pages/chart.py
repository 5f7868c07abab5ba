"""Line charts for chart.html.j2: an SVG that stretches, with labels outside of it that do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from wgpu_lora.pages.scale import Scale, Ticks

SIDE = 1000  # units of the SVG's square view box
COLUMNS = 250  # that lines are thinned to
FEW, MANY = 40, 200  # most points of a line that are drawn as labelled dots, by default and if `marked`
COLOURS = 8  # in base.html.j2
LARGEST = 1e300  # largest value drawn, so that differences stay finite; NaN is left out too
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
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


def line_chart(lines: Sequence[Line], x_label: str, y_label: str, log: bool = False) -> Chart:
    """Lay out several lines in one chart; x begins at 0, and non-finite points are left out.

    Args:
        log: use a logarithmic x axis.
    """
    kept = [(line, [p for p in line.points if all(abs(value) <= LARGEST for value in p)]) for line in lines]
    across = Scale.from_zero((x for _, points in kept for x, _ in points), log)
    up = Scale.around(y for _, points in kept for _, y in points)
    drawn = [_drawn(line, points, across, up, x_label) for line, points in kept if points]
    return Chart(drawn, x_label, y_label, _percent(across.ticks()), _percent([(1 - at, t) for at, t in up.ticks()]))


def _drawn(line: Line, points: Sequence[Point], across: Scale, up: Scale, x_label: str) -> Drawn:
    places = [(across.place(x), 1 - up.place(y)) for x, y in points]
    path = "L".join(f"{_number(x)} {_number(y)}" for x, y in thinned(places))
    dots = []
    if line.style != "faint" and len(points) <= (MANY if line.marked else FEW):
        for (x, y), (at, value) in zip(places, points, strict=True):
            dots.append((_number(x), _number(y), f"{line.name}: {value:.4g} ({x_label} {at:,.6g})"))
    return Drawn(line.name, line.colour % COLOURS, line.style, f"M{path}", dots)


def thinned(places: Sequence[Point]) -> list[Point]:
    """Thin out points to the lowest and the highest of each column, and the ends, in order."""
    if len(places) <= 2 * COLUMNS:
        return list(places)
    columns: dict[int, list[int]] = {}
    for number, (x, _) in enumerate(places):
        columns.setdefault(int(x * COLUMNS), []).append(number)
    kept = {0, len(places) - 1}
    for numbers in columns.values():
        kept |= {min(numbers, key=lambda n: places[n][1]), max(numbers, key=lambda n: places[n][1])}
    return [places[number] for number in sorted(kept)]


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
