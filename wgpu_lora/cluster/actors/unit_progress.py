"""The progress of a unit's tasks, from the events of their training."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wgpu_lora.cluster.cluster_paths import ADAPTERS
from wgpu_lora.cluster.messages import TaskProgress
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.run_state import read_state
from wgpu_lora.train.run.stop_reasons import OUTCOMES

WINDOW = 20  # steps that tokens/s and the time left are measured over
STOPPED, ENDED_EARLY = "stopped", "stopped early"  # as reports and as `train.run.stop_reasons` say it
Event = Mapping[str, Any]


@dataclass
class _Recent:
    """The newest steps of a task: their ends, and their tokens and seconds."""

    ends: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def rate(self) -> float | None:
        seconds = sum(self.seconds)
        return sum(self.tokens) / seconds if seconds > 0 else None

    def seconds_until(self, steps: int) -> float | None:
        """Seconds until `steps` more steps are taken, with what happens between steps."""
        if len(self.ends) < 2:
            return self.seconds[-1] * steps if self.seconds else None
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1) * steps


@dataclass
class UnitProgress:
    """Progress, newest checkpoints and outcomes, by task."""

    names: Sequence[str]
    progress: dict[str, TaskProgress] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    _recent: dict[str, _Recent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.progress = {name: TaskProgress(doing="waiting") for name in self.names}
        self._recent = {name: _Recent() for name in self.names}

    def doing(self, label: str) -> None:
        """Show what all tasks that have not ended wait for."""
        for name, progress in self.progress.items():
            if name not in self.outcomes:
                self.progress[name] = replace(progress, doing=label)

    def resume(self, directory: Path) -> None:
        """Begin with the checkpoints in a unit's directory."""
        for name in self.names:
            newest = run_checkpoint.latest_checkpoint(directory / ADAPTERS / name)
            if newest is None or run_checkpoint.checkpoint_damage(newest):
                continue
            state, _ = read_state(newest)
            self.saved[name] = state.step
            self.progress[name] = replace(
                self.progress[name],
                step=state.step,
                total_steps=state.total_steps,
                loss=state.last_loss,
                eval_loss=state.last_eval_loss,
                best_eval_loss=state.best_eval_loss,
            )

    def take(self, event: Event) -> None:
        """Take an event."""
        kind = event.get("event")
        if act := getattr(self, f"_{kind}", None) if isinstance(kind, str) and kind in _KINDS else None:
            act(event)

    def _name(self, event: Event) -> str:
        """The task of an event; a single run has no name."""
        return str(event.get("adapter") or self.names[0])

    def _waiting(self, event: Event) -> None:
        self.doing(f"waiting for memory, place {event['place']}")

    def _tuning(self, event: Event) -> None:
        self.doing("starting" if event["over"] else "tuning kernels")

    def _loading(self, event: Event) -> None:
        self.doing(f"loading the model, {event['done'] / max(event['total'], 1):.0%}")

    def _evaluating(self, event: Event) -> None:
        name, loss = self._name(event), event.get("loss")
        if event.get("step") is None or name not in self.progress:
            return
        now = self.progress[name]
        if loss is None:
            self.progress[name] = replace(now, doing="measuring the held-out loss")
            return
        best = loss if now.best_eval_loss is None else min(loss, now.best_eval_loss)
        best = best if event["step"] else now.best_eval_loss  # the first is of the untrained adapter
        self.progress[name] = replace(now, eval_loss=loss, best_eval_loss=best, doing="")

    def _step(self, event: Event) -> None:
        name = self._name(event)
        if name not in self.progress:
            return
        recent = self._recent[name]
        recent.ends.append(event["time"])
        recent.tokens.append(event["step_processed_tokens"])
        recent.seconds.append(event["seconds"])
        seconds_left = recent.seconds_until(max(event["total_steps"] - event["step"], 0))
        self.progress[name] = replace(
            self.progress[name],
            step=event["step"],
            total_steps=event["total_steps"],
            loss=event["loss"],
            tokens_per_second=recent.rate(),
            seconds_left=seconds_left if seconds_left is not None and math.isfinite(seconds_left) else None,
            doing="",
        )

    def _saved(self, event: Event) -> None:
        if Path(event["directory"]).name != run_checkpoint.BEST:  # which nothing resumes from
            self.saved[self._name(event)] = event["step"]

    def _retired(self, event: Event) -> None:
        name, outcome = self._name(event), OUTCOMES[event["reason"]]
        if outcome != OUTCOMES["interrupt"]:
            self.outcomes[name] = STOPPED if outcome == ENDED_EARLY else outcome
            self.progress[name] = replace(self.progress[name], seconds_left=None, doing="")


_KINDS = {"waiting", "tuning", "loading", "evaluating", "step", "saved", "retired"}
