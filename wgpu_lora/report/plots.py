"""Pictures of runs, laid over each other. A plot is a function here and its line in `PLOTS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.report.runs import Run

KERNELS = 12  # that get a bar of their own


def _lines(axes: Any, runs: Sequence[Run], key: str, label: str) -> bool:
    """Each run's values by step; whether there were any."""
    drawn = False
    for number, run in enumerate(runs):
        steps, values = run.series(key)
        if steps:
            axes.plot(steps, values, color=f"C{number % 10}", label=run.name)
            drawn = True
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    return drawn


def losses(axes: Any, runs: Sequence[Run]) -> bool:
    drawn = _lines(axes, runs, "loss", "loss, nats a token")
    for number, run in enumerate(runs):
        steps, values = run.series("eval_loss")
        if steps:
            label = f"{run.name}, held out"
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
    groups = list(runs[0].facts["memory"]["groups"])
    left = [0.0] * len(runs)
    for number, group in enumerate(groups):
        values = [run.facts["memory"]["groups"].get(group, 0) / 2**20 for run in runs]
        axes.barh([run.name for run in runs], values, left=left, height=0.5, label=group, color=f"C{number}")
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_xlabel("device memory while training, MiB")
    axes.invert_yaxis()
    return True


def kernels(axes: Any, runs: Sequence[Run]) -> bool:
    profiled = [run for run in runs if run.profile]
    if not profiled:
        return False
    first = profiled[0].profile
    assert first
    names = [kernel["kernel"] for kernel in first["kernels"][:KERNELS]]
    height = 0.8 / len(profiled)
    for number, run in enumerate(profiled):
        assert run.profile
        seconds = {kernel["kernel"]: 1e3 * kernel["seconds"] for kernel in run.profile["kernels"]}
        places = [i + number * height for i in range(len(names))]
        axes.barh(places, [seconds.get(name, 0.0) for name in names], height=height, label=run.name)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(names))], names)
    axes.set_xlabel("milliseconds of a step")
    axes.invert_yaxis()
    return True


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

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("Reports need matplotlib: pip install 'wgpu-lora[plot]'.") from None
    found = {}
    for name, plot in PLOTS.items():
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.subplots()
        if plot(axes, runs):
            axes.grid(alpha=0.3)
            figure.legend(loc="outside right upper")
            found[name] = directory / f"{name}.png"
            figure.savefig(found[name], dpi=110)
    return found
