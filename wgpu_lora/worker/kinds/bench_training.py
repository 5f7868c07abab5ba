"""The job `bench-training`: the whole training loop, timed repeatedly; each record is an event `measured`."""

from __future__ import annotations

from typing import Any

from wgpu_lora.bench.step import training_options
from wgpu_lora.bench.training import Work, run_training
from wgpu_lora.train.ending import FINISHED
from wgpu_lora.worker.child import Ended, Port

OWN = ("port", "where", "repeat", "recipe", "shape", "layers")  # parameters that are not options of a training run


def run(
    port: Port,
    *,
    where: str,
    repeat: int = 2,
    recipe: str | None = None,
    shape: str | None = None,
    layers: int | None = None,
    tokens: int | None = None,
    batch: int | None = None,
    accumulation: int | None = None,
    data: str | None = None,
    model: str | None = None,
    rank: int | None = None,
    base_dtype: str | None = None,
    compute_dtype: str | None = None,
    tune: bool | None = None,
    max_steps: int | None = None,
    epochs: float | None = None,
    device: str | int | None = None,
) -> Ended:
    """The options are those of the command `bench training`. The exit code is 1 if a run did not finish."""
    options: dict[str, Any] = {name: value for name, value in locals().items() if name not in OWN}
    found = run_training(Work(recipe, shape, layers, training_options(options), where), repeat, port)
    reasons = [run["stop_reason"] for run in found["runs"] if run["stop_reason"] not in FINISHED]
    return Ended(found["summary"], int(bool(reasons)), f"a run ended: {reasons[0]}" if reasons else "")
