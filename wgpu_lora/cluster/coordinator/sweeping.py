"""Asking the scheduler of a sweep which of its tasks are to end early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from wgpu_lora.cluster.coordinator.state import Requests, State, TaskState
from wgpu_lora.cluster.facts import RunRequest, Sweep


class Scheduler(Protocol):
    """Decides which tasks of a sweep end early."""

    def reported(self, task: str, step: int, value: float) -> list[str]:
        """Take a task's newest value; returns all tasks of the run that are to end by now."""
        ...

    def state(self) -> dict[str, Any]:
        """What a new one goes on with, as JSON values."""
        ...


Schedulers = Callable[[Sweep, int, dict[str, Any] | None], Scheduler]


class Sweeps:
    """The schedulers of all runs that are sweeps, each made from its state when it is first asked."""

    def __init__(self, make: Schedulers | None):
        self._make = make
        self._made: dict[str, Scheduler] = {}

    def check(self, request: RunRequest) -> None:
        """Make the scheduler of a new run. Raises UserError if the run does not allow it."""
        if request.sweep and request.sweep.scheduler != "none" and self._make:
            self._made[request.name] = self._make(request.sweep, _steps(request), None)

    def ask(self, state: State, requests: Requests, task: TaskState, step: int) -> bool:
        """Ask about a task's newest value, once for each. Returns whether the scheduler has changed."""
        request, run = requests[task.run], state.runs[task.run]
        sweep = request.sweep
        if sweep is None or sweep.scheduler == "none" or self._make is None or task.over or task.ending:
            return False
        value = task.progress.loss if sweep.metric == "loss" else task.progress.eval_loss
        if value is None or (task.asked and (step <= task.asked[0] or value == task.asked[1])):
            return False
        task.asked = [step, value]
        if task.run not in self._made:  # since a restart
            self._made[task.run] = self._make(sweep, _steps(request), run.scheduler)
        for name in self._made[task.run].reported(task.name, step, value):
            other = state.tasks[f"{task.run}/{name}"]
            if not (other.over or other.ending):
                other.ending = "stopped"
        before, run.scheduler = run.scheduler, self._made[task.run].state()
        return run.scheduler != before

    def forget(self, run: str) -> None:
        self._made.pop(run, None)


def _steps(request: RunRequest) -> int:
    """The most that a task of a run takes."""
    return max((plan.steps for plans in request.plans.values() for plan in plans.values()), default=0)
