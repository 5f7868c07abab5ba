"""Pictures of runs, laid over each other. A plot is a function here and its line in `PLOTS`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wgpu_lora.bounded import printable
from wgpu_lora.errors import UserError
from wgpu_lora.installed import pip_line
from wgpu_lora.report.runs import Run

KERNELS = 12  # that get a bar of their own
TITLE = 95  # characters of a line


def _lines(axes: Any, runs: Sequence[Run], key: str, label: str) -> bool:
    """Each run's values by step; whether there were any."""
    drawn = False
    for number, run in enumerate(runs):
        steps, values = run.series[key]
        if steps:
            marker = "o" if len(steps) == 1 else None  # a line needs two
            axes.plot(steps, values, color=f"C{number % 10}", marker=marker, label=_label(run.name))
            drawn = True
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    return drawn


def _label(text: str) -> str:
    """A legend leaves out what begins with an underscore."""
    return printable(f" {text}" if text.startswith("_") else text)


def losses(axes: Any, runs: Sequence[Run]) -> bool:
    drawn = _lines(axes, runs, "loss", "loss, nats a token")
    for number, run in enumerate(runs):
        steps, values = run.series["eval_loss"]
        if steps:
            label = _label(f"{run.name}, held out")
            axes.plot(steps, values, color=f"C{number % 10}", linestyle="--", marker="o", markersize=4, label=label)
    return drawn


def learning_rate(axes: Any, runs: Sequence[Run]) -> bool:
    return _lines(axes, runs, "learning_rate", "learning rate")


def gradient_norm(axes: Any, runs: Sequence[Run]) -> bool:
    return _lines(axes, runs, "grad_norm", "gradient norm before clipping")


def tokens_per_second(axes: Any, runs: Sequence[Run]) -> bool:
    drawn = _lines(axes, runs, "tokens_per_second", "trained tokens a second")
    axes.set_ylim(bottom=0)
    return drawn


def memory(axes: Any, runs: Sequence[Run]) -> bool:
    groups = list(dict.fromkeys(group for run in runs for group in run.memory))
    left = [0.0] * len(runs)
    for number, group in enumerate(groups):
        values = [run.memory.get(group, 0) / 2**20 for run in runs]
        colour = f"C{number % 10}"
        axes.barh(
            [printable(run.name) for run in runs], values, left=left, height=0.5, label=_label(group), color=colour
        )
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_xlabel("device memory while training, MiB")
    axes.invert_yaxis()
    return bool(groups)


def kernels(axes: Any, runs: Sequence[Run]) -> bool:
    profiled = [(run, run.kernels) for run in runs if run.kernels]
    most: dict[str, float] = {}
    for _, seconds in profiled:
        for name, value in seconds.items():
            most[name] = max(value, most.get(name, 0.0))
    names = sorted(most, key=lambda name: -most[name])[:KERNELS]
    height = 0.8 / max(len(profiled), 1)
    for number, (run, seconds) in enumerate(profiled):
        places = [i + number * height for i in range(len(names))]
        values = [1e3 * seconds.get(name, 0.0) for name in names]
        axes.barh(places, values, height=height, label=_label(run.name))
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(names))], names)
    axes.set_xlabel("milliseconds of a step")
    said = [line for run, _ in profiled for line in textwrap.wrap(run.profiled, TITLE)]
    axes.set_title("\n".join(said), fontsize=7, loc="right")
    axes.invert_yaxis()
    return bool(profiled)


PLOTS: dict[str, Callable[[Any, Sequence[Run]], bool]] = {
    "losses": losses,
    "learning-rate": learning_rate,
    "gradient-norm": gradient_norm,
    "tokens-per-second": tokens_per_second,
    "memory": memory,
    "kernels": kernels,
}


def draw(runs: Sequence[Run], directory: Path) -> dict[str, Path]:
    """Draws what the runs have data for into PNG files; returns them by the plots' names.

    An earlier report's pictures of what they have no data for are removed.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"Reports need matplotlib: {pip_line('plot')}") from None
    found = {}
    with rc_context({"text.parse_math": False}):  # a directory's name may have dollars in it
        for name, plot in PLOTS.items():
            path = directory / f"{name}.png"
            figure = Figure(figsize=(9, 4.5), layout="constrained")
            axes = figure.subplots()
            if not plot(axes, runs):
                path.unlink(missing_ok=True)
                continue
            axes.grid(alpha=0.3)
            figure.legend(loc="outside right upper")
            figure.savefig(path, dpi=110)
            found[name] = path
    return found
