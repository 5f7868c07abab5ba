"""What a sweep found: its adapters, the best first."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.cluster.facts import RunView, Snapshot, TaskView
from wgpu_lora.cluster.spec.sweep import RESULTS
from wgpu_lora.errors import UserError, reason
from wgpu_lora.json_files import to_json

VERSION = 1


def value_of(view: TaskView, metric: str) -> float | None:
    """What a task is compared by: its best held-out loss, of which best/ is, or its last training loss."""
    said = view.progress
    if metric == "loss":
        return said.loss
    return said.best_eval_loss if said.best_eval_loss is not None else said.eval_loss


def ranked(views: Sequence[TaskView], metric: str) -> list[TaskView]:
    """The tasks, the best first; failed ones and those without a value come last, by name."""

    def place(view: TaskView) -> tuple[bool, float, str]:
        value = value_of(view, metric)
        usable = value is not None and math.isfinite(value) and view.state != "failed"
        return not usable, value if usable and value is not None else 0.0, view.name

    return sorted(views, key=place)


def results(snapshot: Snapshot, run: RunView) -> dict[str, Any]:
    """The content of sweep.json."""
    metric = run.sweep.metric if run.sweep else "eval_loss"
    views = ranked([view for view in snapshot.tasks if view.run == run.name], metric)
    return {
        "version": VERSION,
        "run": run.name,
        "metric": metric,
        "scheduler": run.sweep.scheduler if run.sweep else "none",
        "over": run.over,
        "adapters": [
            {
                "rank": rank,
                "name": view.name,
                "params": view.params,
                "value": value_of(view, metric),
                "state": view.state,
                "step": view.progress.step,
                "total_steps": view.progress.total_steps,
                "loss": view.progress.loss,
                "eval_loss": view.progress.eval_loss,
                "best_eval_loss": view.progress.best_eval_loss,
                "output": view.output,
                "said": view.said,
            }
            for rank, view in enumerate(views, 1)
        ],
    }


def write_results(snapshot: Snapshot, run: RunView) -> Path:
    """Write sweep.json beside the outputs; into the working directory, if these are in a folder that is not here.

    Raises:
        UserError: it cannot be written.
    """
    found = results(snapshot, run)
    outputs = [one["output"] for one in found["adapters"]]
    beside = Path(os.path.commonpath([os.path.dirname(output) for output in outputs]) if outputs else ".")
    path = (beside if beside.is_dir() else Path()) / RESULTS
    try:
        write_bytes_atomic(path, (to_json(found, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({reason(error)}): mend that for other sweeps, and see the table for its values."
        ) from None
    return path
