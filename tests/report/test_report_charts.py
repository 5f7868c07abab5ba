"""Charts: they fit the data, and the lines of short runs stay visible."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from wgpu_lora.report.comparison_tables import span
from wgpu_lora.report.finished_runs import read_runs
from wgpu_lora.report.line_chart import Line, Scale, line_chart, short, smoothed, thinned
from wgpu_lora.report.run_charts import lengths_differ, plots


def test_points_by_every_axis(runs: Path) -> None:
    (run,) = read_runs([runs / "second"])
    assert [x for x, _ in run.points("loss", "step")] == [1, 2, 3, 4, 5, 6, 7]
    held = run.points("eval_loss", "step")
    assert [x for x, _ in held] == [0, 2, 4, 6, 7]
    assert run.points("eval_loss", "tokens")[0] == (0, held[0][1])
    assert [round(x) for x, _ in run.points("loss", "progress")] == [14, 29, 43, 57, 71, 86, 100]
    assert replace(run, log=[]).points("loss", "progress") == []  # of one that failed at its first step


def test_a_short_run_is_readable_beside_a_long_one(runs: Path) -> None:
    first, second = read_runs([runs / "first", runs / "second"])
    more = [second.log[-1] | {"step": step, "tokens": 9 * step, "seconds": float(step)} for step in range(8, 3000)]
    both = [first, replace(second, log=[*second.log, *more])]
    assert (lengths_differ(both), lengths_differ(both[:1])) == (True, False)
    loss = plots(both)[0]
    by_log = next(view.chart for view in loss.views if view.axis == "step" and view.log)
    short_one = next(line for line in by_log.lines if line.name == "first")
    assert len(short_one.dots) == 7  # each of a few points is marked
    xs = [float(point.split()[0]) for point in short_one.path[1:].split("L")]
    assert xs[-1] - xs[0] > 50 < xs[0]  # of 1000: 5% of the axis, not a thousandth
    assert "running mean" in loss.note


def test_charts_take_what_they_get() -> None:
    chart = line_chart([Line("a", [(1, math.nan), (2, 5.0)]), Line("b", [(3, math.inf)])], "x", "y")
    assert [line.name for line in chart.lines] == ["a"]
    assert not line_chart([], "x", "y").lines
    close = line_chart([Line("a", [(1, 1.7), (2, 1.5)])], "x", "y")
    assert "0" not in [text for _, text in close.y_ticks]  # else it would be one flat line
    far = [(0, -1e308), (1, 1e308), (2, 5e-324), (3, 1e-320)]
    assert line_chart([Line("a", far)], "x", "y", log=True).lines[0].path.count("L") == 1
    flat = line_chart([Line("a", [(0, 0.0), (5, 0.0)])], "x", "y")
    assert flat.lines[0].path == "M0 1000L1000 1000"
    spike = [(i / 10_000, 9.0 if i == 777 else 0.0) for i in range(10_000)]
    assert max(thinned(spike), key=lambda point: point[1]) == spike[777]
    assert len(thinned(spike)) < 2000
    assert smoothed([(0, 0.0), (1, 3.0), (2, 6.0)], 3) == [(0, 1.5), (1, 3.0), (2, 4.5)]


@pytest.mark.parametrize(
    ("values", "log", "ticks"),
    [
        ([3], False, ["0", "1", "2", "3"]),  # steps are whole
        ([0.3], False, ["0", "0.05", "0.1", "0.15", "0.2", "0.25", "0.3"]),
        ([1, 300], True, ["0", "1", "5", "10", "20", "50", "100", "200"]),
        ([1, 2_000_000], True, ["0", "10", "100", "1000", "10k", "100k", "1M"]),
        ([], True, ["0", "1"]),
    ],
)
def test_ticks_are_round_and_apart(values: list[float], log: bool, ticks: list[str]) -> None:
    found = Scale.from_zero(values, log).ticks()
    assert [text for _, text in found] == ticks
    assert all(0 <= place <= 1 for place, _ in found)


def test_numbers_in_few_characters() -> None:
    assert [short(v) for v in (0, 0.00002, 0.1 + 0.2, 9999, 10_000, 2_500_000)] == [
        "0",
        "2e-05",
        "0.3",
        "9999",
        "10k",
        "2.5M",
    ]
    assert [span(v) for v in (9.74, 725, 11_520)] == ["9.7 s", "12 min 05 s", "3 h 12 min"]
