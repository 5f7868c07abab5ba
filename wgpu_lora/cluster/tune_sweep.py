"""Sweeps with a scheduler: Ray Tune runs a trial for each task, and ends poor ones early."""

from __future__ import annotations

from importlib.util import find_spec

from wgpu_lora.errors import UserError
from wgpu_lora.installation import pip_line

DEVICE = "webgpu"  # the resource of which each node has as many as devices
STEP, LOSS, EVAL_LOSS = "step", "loss", "eval_loss"  # of a report
FAILURES = 3  # of a trial
RUN = "run"  # the directory of a checkpoint that has the trial's run


def check_tune() -> None:
    """Raises UserError if the libraries that Ray Tune needs are not installed."""
    missing = [name for name in ("ray", "pandas", "pyarrow", "fsspec", "requests") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"ASHA needs Ray Tune, whose library {missing[0]} is not installed: run {pip_line('sweep')}, or leave the "
            "scheduler out."
        )
