"""Plots of loss curves, if matplotlib is installed (the `plot` extra)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wgpu_lora.bounded import printable
from wgpu_lora.train.output import LOG, read_log

CURVES = "losses.png"


def draw_curves(runs: Mapping[str, Path], path: Path) -> bool:
    """Plot every run's training loss and, if measured, held-out loss by step; returns False without matplotlib.

    Args:
        runs: name -> directory of its log.jsonl.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # the object API: no window and no global state
    except ImportError:
        return False
    with rc_context({"text.parse_math": False}):  # an adapter's name may contain dollar signs
        figure = Figure(figsize=(9, 5), layout="constrained")
        _draw(figure.subplots(), runs)
        figure.savefig(path, dpi=120)
    return True


def _draw(axes: Any, runs: Mapping[str, Path]) -> None:
    for number, (name, directory) in enumerate(runs.items()):
        log = read_log(directory / LOG) if (directory / LOG).is_file() else []
        colour, shown = f"C{number % 10}", printable(name)
        trained = [(entry["step"], entry["loss"]) for entry in log if "loss" in entry]
        axes.plot(*zip(*trained, strict=True) if trained else ([], []), color=colour, label=shown)
        heldout = [(entry["step"], entry["eval_loss"]) for entry in log if "eval_loss" in entry]
        if heldout:
            steps, losses = zip(*heldout, strict=True)
            axes.plot(steps, losses, color=colour, linestyle="--", marker="o", markersize=4, label=f"{shown}, held out")
    axes.set_xlabel("optimizer steps of the adapter")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    if runs:
        axes.legend()
