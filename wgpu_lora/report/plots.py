"""Charts of runs, laid over each other. A line chart is an entry of `PLOTS`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from wgpu_lora.pages.chart import COLOURS, Chart, Line, line_chart, parts, smoothed
from wgpu_lora.report.runs import SPEEDS, Run
from wgpu_lora.train.memory import readable

KERNELS = 12  # that get a bar of their own
LONG = 50  # points of a line that is smoothed
SMOOTHED = 25  # windows of a line
UNLIKE = 4  # times as long: then the longest run leaves no room for the shortest, unless the axis is logarithmic
UNITS = (("hours", 3600.0, 2.0), ("minutes", 60.0, 2.0), ("seconds", 1.0, 0.0))  # name, seconds, from how many on
TRAINED, PROCESSED = SPEEDS.values()
# Title -> label, how its lines are to be read, and a run's lines: (key of the log, style, what follows the run's name).
# "mean" is of what jumps from step to step: it is faint, with its mean over it. "dots" is dashed and marked.
PLOTS: dict[str, tuple[str, str, tuple[tuple[str, str, str], ...]]] = {
    "Loss": (
        "loss",
        "Solid: training. Dashed, with dots: held out.",
        (("loss", "mean", ""), ("eval_loss", "dots", ", held out")),
    ),
    "Learning rate": ("learning rate", "", (("learning_rate", "line", ""),)),
    "Gradient norm": ("norm before clipping", "", (("grad_norm", "mean", ""),)),
    "Speed": (
        "tokens per second",
        "Solid: trained tokens, which have a loss. Dashed: processed tokens, prompts included.",
        ((TRAINED, "line", ", trained"), (PROCESSED, "dashed", ", processed")),
    ),
}
FAINT = "Faint lines are as logged, strong ones their running mean."


class View(NamedTuple):
    """A chart by one axis, linear or logarithmic."""

    axis: str
    log: bool
    chart: Chart


class Plot(NamedTuple):
    """A line chart by every axis. note: what its lines are."""

    title: str
    note: str
    views: list[View]


def axes_of(runs: Sequence[Run]) -> dict[str, str]:
    """The axes that there are, with their labels; the last lays runs of unlike lengths beside each other."""
    unit, _ = _unit(runs)
    axes = {"step": "optimizer step", "tokens": "trained tokens", "seconds": f"{unit} of training"}
    return axes | ({"progress": "per cent of the run"} if len(runs) > 1 else {})


def unlike(runs: Sequence[Run]) -> bool:
    """Whether the longest run has so many steps that the shortest would be a dot beside it."""
    last = [run.log[-1]["step"] for run in runs if run.log]
    return bool(last) and max(last) > UNLIKE * max(1, min(last))


def plots(runs: Sequence[Run]) -> list[Plot]:
    """Every line chart that the runs have data for."""
    found = []
    for title, (label, note, _) in PLOTS.items():
        views = []
        for axis, x_label in axes_of(runs).items():
            lines = list(_lines(runs, title, axis))
            scales = (False,) if axis == "progress" else (False, True)
            views += [View(axis, log, line_chart(lines, x_label, label, log)) for log in scales if lines]
        if views:
            faint = any(line.style == "faint" for view in views for line in view.chart.lines)
            found.append(Plot(title, f"{note} {FAINT if faint else ''}".strip(), views))
    return found


def _lines(runs: Sequence[Run], title: str, axis: str) -> Iterator[Line]:
    unit = _unit(runs)[1] if axis == "seconds" else 1.0
    for colour, run in enumerate(runs):
        for key, style, suffix in PLOTS[title][2]:
            name, points = f"{run.name}{suffix}", [(x / unit, y) for x, y in run.points(key, axis)]
            if style == "mean" and len(points) >= LONG:
                yield Line(name, points, colour, "faint")
                points = smoothed(points, max(3, len(points) // SMOOTHED))
            drawn = {"mean": "line", "dots": "dashed"}.get(style, style)
            if points:
                yield Line(name, points, colour, drawn, marked=style == "dots")


def _unit(runs: Sequence[Run]) -> tuple[str, float]:
    """The unit of the longest run's time."""
    longest = max((run.log[-1]["seconds"] for run in runs if run.log), default=0.0)
    return next((name, size) for name, size, least in UNITS if longest >= least * size)


class Bar(NamedTuple):
    """spans: (start, width, colour, tooltip) of each part."""

    label: str
    value: str
    spans: list[tuple[str, str, int, str]]

    @classmethod
    def of(cls, label: str, value: str, whole: float, sizes: Sequence[tuple[float, int, str]]) -> Bar:
        """sizes: (size, colour, tooltip) of each part; `whole` is as wide as the page."""
        places = parts((size for size, _, _ in sizes), whole)
        return cls(label, value, [(*at, c % COLOURS, said) for at, (_, c, said) in zip(places, sizes, strict=True)])


def memory(runs: Sequence[Run]) -> dict[str, list[int]]:
    """The bytes of every run, by group."""
    held = [run.record.memory.groups for run in runs]
    groups = dict.fromkeys(group for sizes in held for group in sizes)
    return {group: [sizes.get(group, 0) for sizes in held] for group in groups}


def memory_bars(runs: Sequence[Run]) -> list[Bar]:
    """A bar for each run, with a part for each group."""
    held, bars = memory(runs), []
    totals = [sum(run.record.memory.groups.values()) for run in runs]
    for number, total in enumerate(totals):
        sizes = [
            (of[number], colour, f"{group}: {readable(of[number])}") for colour, (group, of) in enumerate(held.items())
        ]
        bars.append(Bar.of(runs[number].name, readable(total), max(totals), sizes))
    return bars


def kernels(runs: Sequence[Run]) -> dict[str, list[Bar]]:
    """The most expensive kernels, each with a bar for every run that was profiled."""
    profiled = [(colour, run.name, run.kernels) for colour, run in enumerate(runs) if run.kernels]
    most: dict[str, float] = {}
    for *_, seconds in profiled:
        most |= {kernel: max(spent, most.get(kernel, 0.0)) for kernel, spent in seconds.items()}
    found: dict[str, list[Bar]] = {kernel: [] for kernel in sorted(most, key=lambda name: -most[name])[:KERNELS]}
    for kernel, bars in found.items():
        for colour, name, seconds in profiled:
            spent = seconds.get(kernel, 0.0)
            said = f"{1e3 * spent:,.2f} ms"
            bars.append(Bar.of(name, said, max(most.values()), [(spent, colour, f"{name}: {said}")]))
    return found
