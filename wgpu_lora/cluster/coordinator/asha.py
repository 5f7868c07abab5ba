"""ASHA for sweeps: Ray Tune's scheduler, asked directly, since our tasks are not trials that Tune runs.

Li et al., A System for Massively Parallel Hyperparameter Tuning (2018), https://arxiv.org/abs/1810.05934.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from wgpu_lora.cluster.facts import Sweep
from wgpu_lora.errors import UserError
from wgpu_lora.installation import pip_line

Result = tuple[str, int, float]  # a task, its step and its value
STEP, VALUE = "step", "value"  # of a result, for the scheduler


def check_tune() -> None:
    """Called before a sweep that ASHA shall shorten.

    Raises:
        UserError: the libraries that Ray Tune needs are not installed.
    """
    missing = [name for name in ("ray", "pandas", "pyarrow", "fsspec", "requests") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"ASHA needs Ray Tune, whose library {missing[0]} is not installed: run {pip_line('sweep')}, or leave the "
            "scheduler out."
        )


class Asha:
    """Which tasks of a sweep end early.

    A task is compared at rungs, after `grace_period` times powers of `reduction_factor` steps, with all tasks that have
    come that far, and goes on if it is among the best `1 / reduction_factor` of them. The first results at a rung are
    kept until there are `reduction_factor` of them, and are told the scheduler the best first: it lets go on whatever
    comes first, and the members of a pipeline always come in the same order.

    The decisions are a function of the results in their order, so the state is those results, of one per task and rung.
    """

    def __init__(self, sweep: Sweep, steps: int, state: Mapping[str, Any] | None = None):
        """
        Args:
            steps: the most that a task takes. state: of an earlier one, to go on from.

        Raises:
            UserError: Ray Tune is not installed, or no rung comes before the end of the tasks.
            ValueError: the state is not one.
        """
        check_tune()
        if not steps:
            raise UserError("ASHA compares tasks by steps, but these end by time: give max_steps or num_train_epochs.")
        if sweep.grace_period >= steps:
            raise UserError(
                f"ASHA's grace period of {sweep.grace_period:,} steps leaves nothing to end early, since the longest "
                f"task has {steps:,}: give a smaller one."
            )
        schedulers = import_module("ray.tune.schedulers")
        self._stop: str = schedulers.TrialScheduler.STOP
        self._scheduler = schedulers.AsyncHyperBandScheduler(
            time_attr=STEP, metric=VALUE, mode="min", max_t=steps, grace_period=sweep.grace_period,
            reduction_factor=sweep.reduction_factor, stop_last_trials=False,
        )  # fmt: skip
        rungs = int(math.log(steps / sweep.grace_period) / math.log(sweep.reduction_factor) + 1)  # as the scheduler's
        self._rungs = [sweep.grace_period * sweep.reduction_factor**k for k in range(rungs)]
        self._enough = math.ceil(sweep.reduction_factor)
        self._first: dict[int, list[Result]] = {}  # results at rungs that have too few, by the rung's number
        self._compared: set[int] = set()  # rungs that have enough
        self._trials: dict[str, SimpleNamespace] = {}
        self._reached: dict[str, int] = {}  # how many rungs each task has
        self._ending: set[str] = set()
        self._results: list[Result] = []
        for task, step, value in (state or {}).get("results", []):
            self.reported(str(task), int(step), float(value))

    def reported(self, task: str, step: int, value: float) -> list[str]:
        """Take a task's result after a number of steps, lower is better; returns all tasks that are to end by now.

        Results between rungs, or from steps that a task that has moved takes again, decide nothing.
        """
        reached = sum(rung <= step for rung in self._rungs)
        if math.isfinite(value) and reached > self._reached.get(task, 0):
            self._reached[task] = reached
            self._results.append((task, step, value))
            for result in self._told(reached, (task, step, value)):
                self._tell(*result)
        return sorted(self._ending)

    def _told(self, rung: int, result: Result) -> list[Result]:
        """What the scheduler is told now of a rung."""
        if rung in self._compared:
            return [result]
        first = self._first.setdefault(rung, [])
        first.append(result)
        if len(first) < self._enough:
            return []
        self._compared.add(rung)
        return sorted(self._first.pop(rung), key=lambda one: one[2])

    def _tell(self, task: str, step: int, value: float) -> None:
        if task not in self._trials:
            self._trials[task] = SimpleNamespace(trial_id=task)
            self._scheduler.on_trial_add(None, self._trials[task])
        if self._scheduler.on_trial_result(None, self._trials[task], {STEP: step, VALUE: value}) == self._stop:
            self._ending.add(task)

    def state(self) -> dict[str, Any]:
        """What another one goes on from, as JSON values."""
        return {"results": [list(result) for result in self._results]}
