"""Why a run ends, and its outcome: finished, stopped early, interrupted or failed."""

from __future__ import annotations

import signal

from wgpu_lora.ops.optimizer import MAX_PARAMETER

STOP_TEXT = {
    "epochs": "all epochs are done",
    "max steps": "the step limit is reached",
    "target seconds": "the time budget is used",
    "interrupt": "a signal or Ctrl-C",
    "callback": "stopped by the callback",
    "request": "ended by request",
    "non-finite": "the loss or the gradient is not finite; the update was not applied, and the adapter is the last "
    "good one",
    "diverged": f"the update would have left weights not finite or larger than {MAX_PARAMETER:,.0f}; it was not "
    "applied, and the adapter is the last good one",
}

FINISHED = ("epochs", "max steps", "target seconds")
RESUMABLE = ("interrupt", "callback")
OUTCOMES = {
    **dict.fromkeys(FINISHED, "finished"),
    "interrupt": "interrupted",
    "callback": "stopped early",
    "request": "stopped early",
    "non-finite": "failed",
    "diverged": "failed",
}


def exit_code(reason: str, signal_name: str | None) -> int:
    """0, 1 for a failed run, or 128 plus the number of the signal that interrupted it."""
    if reason == "interrupt":
        return 128 + (signal.Signals[signal_name] if signal_name else signal.SIGINT)
    return 1 if reason in ("non-finite", "diverged") else 0
