"""Charts with the lines of all runs. A line chart is an entry of `PLOTS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from wgpu_lora.cli.report.finished_runs import SPEEDS, Run
from wgpu_lora.cli.report.line_chart import COLOURS, Chart, Series, line_chart, parts, smoothed
from wgpu_lora.train.memory import format_bytes
from wgpu_lora.train.objectives.sft import ACCURACY
from wgpu_lora.train.track.hardware import Status
from wgpu_lora.train.track.hardware.sampler import LOW, SPAN, held_back

KERNELS = 12  # most kernels that are shown
LONG = 50  # fewest points of a line that is smoothed
SMOOTHED = 25  # windows of a line
UNLIKE = 4  # times as many steps: then the axis is logarithmic, so that the shortest run remains visible
UNITS = (("hours", 3600.0, 2.0), ("minutes", 60.0, 2.0), ("seconds", 1.0, 0.0))  # name, seconds, from how many on
TRAINED, PROCESSED = SPEEDS.values()
# Title -> label, note on its lines, and the lines of a run: (key of the log, style, suffix of the run's name).
# "mean" is for values that vary from step to step: a faint line, and its running mean. "dots" is dashed and marked.
PLOTS: dict[str, tuple[str, str, tuple[tuple[str, str, str], ...]]] = {
    "Loss": (
        "loss",
        "Solid: training. Dashed, with dots: held out.",
        (("loss", "mean", ""), ("eval_loss", "dots", ", held out")),
    ),
    "Token accuracy": (
        "share of tokens",
        "Trained tokens that are the most likely ones. Solid: training. Dashed, with dots: held out.",
        ((ACCURACY, "mean", ""), (f"eval_{ACCURACY}", "dots", ", held out")),
    ),
    "Reward": (
        "reward",
        "Solid: of sampled completions. Dashed, with dots: held out.",
        (("reward", "mean", ""), ("eval_reward", "dots", ", held out")),
    ),
    "Entropy": ("nats per token", "", (("entropy", "mean", ""),)),
    "Length of completions": ("tokens", "", (("completions/mean_length", "mean", ""),)),
    "Learning rate": ("learning rate", "", (("learning_rate", "line", ""),)),
    "Gradient norm": ("norm before clipping", "", (("grad_norm", "mean", ""),)),
    "Speed": (
        "tokens per second",
        "Solid: trained tokens, which count in the loss. Dashed: processed tokens, including prompts.",
        ((TRAINED, "line", ", trained"), (PROCESSED, "dashed", ", processed")),
    ),
    "Utilisation": ("share of time in use, in %", "Of the device, by all programs.", (("gpu_busy", "line", ""),)),
    "Power": ("watts", "Dashed: the limit.", (("gpu_power", "line", ""), ("gpu_power_limit", "dashed", ", limit"))),
    "Temperature": ("degrees Celsius", "", (("gpu_temperature", "line", ""),)),
    "Memory in use": ("GiB", "Of the device, by all programs.", (("gpu_memory", "line", ""),)),
}
FAINT = "Faint lines are the logged values, strong ones their running mean."


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
    """The axes with their labels; the last makes runs of different lengths comparable."""
    unit, _ = _unit(runs)
    axes = {"step": "optimizer step", "tokens": "trained tokens", "seconds": f"{unit} of training"}
    return axes | ({"progress": "per cent of the run"} if len(runs) > 1 else {})


def lengths_differ(runs: Sequence[Run]) -> bool:
    """Whether the longest run has so many steps that the shortest would be hardly visible."""
    last = [run.log[-1]["step"] for run in runs if run.log]
    return bool(last) and max(last) > UNLIKE * max(1, min(last))


def plots(runs: Sequence[Run]) -> list[Plot]:
    """Every line chart that the runs have data for."""
    result = []
    for title, (label, note, _) in PLOTS.items():
        views = []
        for axis, x_label in axes_of(runs).items():
            lines = list(_lines(runs, title, axis))
            scales = (False,) if axis == "progress" else (False, True)
            views += [View(axis, log, line_chart(lines, x_label, label, log)) for log in scales if lines]
        if views:
            faint = any(line.style == "faint" for view in views for line in view.chart.lines)
            notes = [note, FAINT if faint else "", *(map(_low_power, runs) if title == "Power" else ())]
            result.append(Plot(title, " ".join(filter(None, notes)), views))
    return result


def _low_power(run: Run) -> str:
    """A sentence if a run's device was fully in use for SPAN seconds at a low power; else empty."""
    begin = None
    for line in run.log:
        status = Status(busy=line.get("gpu_busy"), power=line.get("gpu_power"), power_limit=line.get("gpu_power_limit"))
        begin = (line["seconds"] if begin is None else begin) if held_back(status) else None
        if begin is not None and line["seconds"] - begin >= SPAN:
            return f"{run.name} took less than {LOW:.0%} of the limit at full use: it is shared or throttled."
    return ""


def _lines(runs: Sequence[Run], title: str, axis: str) -> Iterator[Series]:
    unit = _unit(runs)[1] if axis == "seconds" else 1.0
    for colour, run in enumerate(runs):
        for key, style, suffix in PLOTS[title][2]:
            name, points = f"{run.name}{suffix}", [(x / unit, y) for x, y in run.points(key, axis)]
            if style == "mean" and len(points) >= LONG:
                yield Series(name, points, colour, "faint")
                points = smoothed(points, max(3, len(points) // SMOOTHED))
            line_style = {"mean": "line", "dots": "dashed"}.get(style, style)
            if points:
                yield Series(name, points, colour, line_style, marked=style == "dots")


def _unit(runs: Sequence[Run]) -> tuple[str, float]:
    """The unit of the longest run's time."""
    longest = max((run.log[-1]["seconds"] for run in runs if run.log), default=0.0)
    return next((name, size) for name, size, minimum in UNITS if longest >= minimum * size)


class Bar(NamedTuple):
    """spans: (start, width, colour, tooltip) of each part."""

    label: str
    value: str
    spans: list[tuple[str, str, int, str]]

    @classmethod
    def of(cls, label: str, value: str, whole: float, sizes: Sequence[tuple[float, int, str]]) -> Bar:
        """sizes: (size, colour, tooltip) of each part; `whole` is the size of the whole width."""
        positions = parts((size for size, _, _ in sizes), whole)
        return cls(label, value, [(*at, c % COLOURS, text) for at, (_, c, text) in zip(positions, sizes, strict=True)])


def memory(runs: Sequence[Run]) -> dict[str, list[int]]:
    """The bytes of every run, by group."""
    run_sizes = [run.record.memory.groups for run in runs]
    groups = dict.fromkeys(group for sizes in run_sizes for group in sizes)
    return {group: [sizes.get(group, 0) for sizes in run_sizes] for group in groups}


def memory_bars(runs: Sequence[Run]) -> list[Bar]:
    """A bar for each run, with a part for each group."""
    groups, bars = list(memory(runs)), []
    largest = max(sum(run.record.memory.groups.values()) for run in runs)
    for run in runs:
        group_bytes = run.record.memory.groups
        sizes = [(size, groups.index(group), f"{group}: {format_bytes(size)}") for group, size in group_bytes.items()]
        bars.append(Bar.of(run.name, format_bytes(sum(group_bytes.values())), largest, sizes))
    return bars


def kernels(runs: Sequence[Run]) -> dict[str, list[Bar]]:
    """The most expensive kernels, each with a bar for every run that was profiled."""
    profiled = [(colour, run.name, run.kernels) for colour, run in enumerate(runs) if run.kernels]
    names = {kernel for *_, seconds in profiled for kernel in seconds}
    max_seconds = {kernel: max(seconds.get(kernel, 0.0) for *_, seconds in profiled) for kernel in sorted(names)}

    def bar(kernel: str, colour: int, name: str, seconds: Mapping[str, float]) -> Bar:
        kernel_seconds = seconds.get(kernel, 0.0)
        text = f"{1e3 * kernel_seconds:,.2f} ms"
        return Bar.of(name, text, max(max_seconds.values()), [(kernel_seconds, colour, f"{name}: {text}")])

    largest = sorted(max_seconds, key=lambda kernel: -max_seconds[kernel])[:KERNELS]
    return {kernel: [bar(kernel, *profile) for profile in profiled] for kernel in largest}
