"""Why a run ends, and the four words for it: finished, stopped early, interrupted, failed."""

from __future__ import annotations

import signal

from wgpu_lora.ops.optimizer import MAX_PARAMETER

STOP_TEXT = {
    "epochs": "all epochs are done",
    "max steps": "the step limit is reached",
    "target seconds": "the time budget is used",
    "interrupt": "a signal, or Ctrl-C",
    "callback": "the callback asked for it",
    "non-finite": "the loss or the gradient is not finite; no update was applied, and the adapter is the last good one",
    "diverged": f"the next update would have left weights not finite, or beyond {MAX_PARAMETER:,.0f}; it was not "
    "applied, and the adapter is the last good one",
}

FINISHED = ("epochs", "max steps", "target seconds")
RESUMABLE = ("interrupt", "callback")
OUTCOMES = {
    **dict.fromkeys(FINISHED, "finished"),
    "interrupt": "interrupted",
    "callback": "stopped early",
    "non-finite": "failed",
    "diverged": "failed",
}


def exit_code(reason: str, signal_name: str | None) -> int:
    """0, 1 for a run that failed, or what a shell gives a program that a signal ended."""
    if reason == "interrupt":
        return 128 + (signal.Signals[signal_name] if signal_name else signal.SIGINT)
    return 1 if reason in ("non-finite", "diverged") else 0
