"""Why a run ends, and its outcome: finished, stopped early, interrupted or failed."""

from __future__ import annotations

import signal

from wgpu_lora.ops.gradient_norm import MAX_PARAMETER

STOP_TEXT = {
    "epochs": "all epochs are done",
    "max steps": "the step limit is reached",
    "target seconds": "the time budget is used",
    "interrupt": "a signal or Ctrl-C",
    "callback": "stopped by the callback",
    "request": "ended by request",
    "no rewards": "the reward functions failed on all completions, so that nothing was learned",
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
    "no rewards": "failed",
    "non-finite": "failed",
    "diverged": "failed",
}


def exit_code(reason: str, signal_name: str | None) -> int:
    """0, 1 for a failed run, or 128 plus the number of the signal that interrupted it."""
    if reason == "interrupt":
        return 128 + (signal.Signals[signal_name] if signal_name else signal.SIGINT)
    return 1 if OUTCOMES[reason] == "failed" else 0


class Requests:
    """Names of adapters to end, which the trainer looks up between steps. A single run has the name None."""

    def __init__(self) -> None:
        self._ending: set[str | None] = set()

    def end(self, name: str | None) -> None:
        """End an adapter after the current step, with its results; the others of its pipeline go on."""
        self._ending.add(name)

    def ending(self, name: str | None) -> bool:
        """Whether an adapter was asked to end."""
        return name in self._ending
