"""Charts of runs, laid over each other. A line chart is a function here and its line in `PLOTS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from wgpu_lora.pages.chart import COLOURS, Chart, Line, line_chart, parts, smoothed
from wgpu_lora.report.runs import SPEEDS, Point, Run
from wgpu_lora.train.memory import readable

KERNELS = 12  # that get a bar of their own
LONG = 50  # points of a line that is smoothed
SMOOTHED = 25  # windows of a line
UNLIKE = 4  # times as long: then the longest run leaves no room for the shortest, unless the axis is logarithmic
UNITS = (("hours", 3600.0, 2.0), ("minutes", 60.0, 2.0), ("seconds", 1.0, 0.0))  # name, seconds, from how many on
Points = Callable[[str], list[Point]]


@dataclass(frozen=True)
class View:
    """A chart by one axis, linear or logarithmic."""

    axis: str
    log: bool
    chart: Chart


@dataclass(frozen=True)
class Plot:
    """A line chart by every axis. note: what its lines are."""

    title: str
    note: str
    views: list[View]


def _with_mean(run: Run, points: list[Point], colour: int) -> list[Line]:
    """What jumps from step to step is faint, with its mean over it."""
    if len(points) < LONG:
        return [Line(run.name, points, colour)]
    mean = smoothed(points, max(3, len(points) // SMOOTHED))
    return [Line(run.name, points, colour, "faint"), Line(run.name, mean, colour)]


def losses(run: Run, by: Points, colour: int) -> list[Line]:
    held = Line(f"{run.name}, held out", by("eval_loss"), colour, "dashed", marked=True)
    return [*_with_mean(run, by("loss"), colour), held]


def learning_rate(run: Run, by: Points, colour: int) -> list[Line]:
    return [Line(run.name, by("learning_rate"), colour)]


def gradient_norm(run: Run, by: Points, colour: int) -> list[Line]:
    return _with_mean(run, by("grad_norm"), colour)


def speed(run: Run, by: Points, colour: int) -> list[Line]:
    styles = zip(SPEEDS.items(), ("line", "dashed"), strict=True)
    return [Line(f"{run.name}, {kind}", by(key), colour, style) for (kind, key), style in styles]


# Title -> (label, how its lines are to be read, the lines of a run)
PLOTS: dict[str, tuple[str, str, Callable[[Run, Points, int], list[Line]]]] = {
    "Loss": ("loss", "Solid: training. Dashed, with dots: held out.", losses),
    "Learning rate": ("learning rate", "", learning_rate),
    "Gradient norm": ("norm before clipping", "", gradient_norm),
    "Speed": (
        "tokens per second",
        "Solid: trained tokens, which have a loss. Dashed: processed tokens, prompts included.",
        speed,
    ),
}
FAINT = "Faint lines are as logged, strong ones their running mean."


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
    for title, (label, note, draw) in PLOTS.items():
        views, faint = [], ""
        for axis, x_label in axes_of(runs).items():
            unit = _unit(runs)[1] if axis == "seconds" else 1.0
            lines = [
                line
                for n, run in enumerate(runs)
                for line in draw(run, partial(_points, run, axis, unit), n)
                if line.points
            ]
            if lines:
                scales = (False,) if axis == "progress" else (False, True)
                views += [View(axis, log, line_chart(lines, x_label, label, log)) for log in scales]
                faint = FAINT if any(line.style == "faint" for line in lines) else ""
        if views:
            found.append(Plot(title, f"{note} {faint}".strip(), views))
    return found


def _points(run: Run, axis: str, unit: float, key: str) -> list[Point]:
    return [(x / unit, y) for x, y in run.points(key, axis)]


def _unit(runs: Sequence[Run]) -> tuple[str, float]:
    """The unit of the longest run's time."""
    longest = max((run.log[-1]["seconds"] for run in runs if run.log), default=0.0)
    return next((name, size) for name, size, least in UNITS if longest >= least * size)


# -- bars --------------------------------------------------------------------------------------------------------------

Span = tuple[str, str, int, str]  # start, width, colour, what it says


@dataclass(frozen=True)
class Bar:
    """label, and the parts and the value of a line of bars."""

    label: str
    spans: list[Span]
    value: str


def memory(runs: Sequence[Run]) -> tuple[list[str], list[Bar]]:
    """The groups, in the order of their colours, and a bar for each run."""
    groups = list(dict.fromkeys(group for run in runs for group in run.memory))
    most = max((sum(run.memory.values()) for run in runs), default=0.0)
    bars = []
    for run in runs:
        values = [run.memory.get(group, 0.0) for group in groups]
        said = [f"{group}: {readable(int(value))}" for group, value in zip(groups, values, strict=True)]
        spans = [
            (start, width, n % COLOURS, text)
            for n, ((start, width), text) in enumerate(zip(parts(values, most), said, strict=True))
        ]
        bars.append(Bar(run.name, spans, readable(int(sum(values)))))
    return groups, bars


def kernels(runs: Sequence[Run]) -> dict[str, list[Bar]]:
    """The most expensive kernels, each with a bar for every run that was profiled."""
    profiled = [(n, run.name, run.kernels) for n, run in enumerate(runs) if run.kernels]
    most: dict[str, float] = {}
    for _, _, seconds in profiled:
        for name, value in seconds.items():
            most[name] = max(value, most.get(name, 0.0))
    longest = max(most.values(), default=0.0)
    found: dict[str, list[Bar]] = {}
    for kernel in sorted(most, key=lambda name: -most[name])[:KERNELS]:
        found[kernel] = []
        for number, name, seconds in profiled:
            said = f"{1e3 * seconds.get(kernel, 0.0):,.2f} ms"
            ((start, width),) = parts([seconds.get(kernel, 0.0)], longest)
            found[kernel].append(Bar(name, [(start, width, number % COLOURS, f"{name}: {said}")], said))
    return found
