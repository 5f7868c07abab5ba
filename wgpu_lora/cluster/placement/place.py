"""Which tasks to start now, and where."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wgpu_lora.cluster.placement.field import Field, Numbers
from wgpu_lora.cluster.placement.together import start_together
from wgpu_lora.cluster.placement.types import Place, Placement, Waiting
from wgpu_lora.cluster.placement.units import Starting, Units

SLACK = 1.1  # how much later than on the best device a task may end on one with a better score


def place(waiting: Sequence[Waiting], places: Sequence[Place], now: float = 0.0) -> list[Placement]:
    """Decide what starts now. Equal arguments give equal results, in whatever order they are.

    All tasks are planned, the longest first, as if none were to come: each goes where it ends first, which may be
    behind another task on a fast device that is busy now. Only what starts at once by that plan is started. So no long
    task begins on a slow device where it would end later than by waiting, and the last tasks end at about the same time
    (list scheduling on uniform machines, the longest first).

    Among the idle devices where a task ends at most 10% later than where it ends first, it goes to that with the best
    score (`Field.scores`). By the score alone, a large card would draw all tasks, however slow it is.

    Length is the time on an average device. It counts more where few devices have the memory, so that tasks which fit
    anywhere do not take these first. The time that a task has waited is added: what comes later overtakes it for a
    bounded time only. For a task of several devices, those that are idle are kept until it can begin; only what ends
    before runs on them. How tasks are joined into pipelines is in `Units`.

    Args:
        waiting: tasks with different names.
        places: devices; those that are `out` are not used.
        now: by the clock of `Waiting.since`, for the time that tasks have waited.

    Returns:
        The placements, in the order in which they were decided.
    """
    field = Field(places)
    if not waiting or not field.open.any():
        return []
    return _Decision(field, waiting, now).placements()


class _Decision:
    def __init__(self, field: Field, waiting: Sequence[Waiting], now: float):
        self.field = field
        tasks = sorted(waiting, key=lambda task: task.task)
        needs = field.needs(tasks)
        order = np.argsort(-ranks(field, tasks, needs, now), kind="stable")
        self.tasks = [(tasks[row], needs[row]) for row in order]
        # Devices on which nothing fits now do not keep the planning going.
        self.useful = (needs <= field.free).any(axis=0)
        self.units = Units(field, self.tasks)
        self.found: list[Placement | Starting] = []

    def placements(self) -> list[Placement]:
        field, units = self.field, self.units
        waits = (self.useful & field.open).any()
        for task, need in self.tasks:
            if not units.next(task):
                continue
            if task.devices > 1:
                together = start_together(field, task, need, SLACK)
                if together:
                    self.found.append(together)
                started = together is not None
            else:
                started = self._one(task, need)
            if started:
                waits = (self.useful & field.open).any()
            if not waits and not units.may_grow():
                break
        return [one if isinstance(one, Placement) else one.placement(field) for one in self.found]

    def _one(self, task: Waiting, need: Numbers) -> bool:
        """Start, join or queue a task of one device; True if it starts a unit."""
        field = self.field
        start, length = field.start, _length(task, field.cost)
        if field.kept:
            start = np.where(field.open & (length > field.gap), field.ready, start)
        ends = np.where(need <= field.limit, start + length, math.inf)
        at = int(ends.argmin())
        best = float(ends[at])
        if best == math.inf:
            return False  # it waits for memory or a device of which nobody knows when it is free
        good = (start == 0.0) & field.open & (ends <= SLACK * best)
        if good.any():
            scores = np.where(good, field.scores(task, need), -1.0)
            at = int(scores.argmax())
            field.begin(at, float(need[at]), float(ends[at]))
            self.found.append(self.units.start(task, at, int(need[at]), float(scores[at])))
            return True
        if not (task.joinable and self.units.join(task, need, SLACK * best)):
            field.ready[at] += length[at] / field.slots[at]
            field.refresh(at)
        return False


def ranks(field: Field, tasks: Sequence[Waiting], needs: Numbers, now: float) -> Numbers:
    """How early each task is planned [tasks]: by length, scarcity of memory and the time waited; see `place`."""
    total, usual = field.speed.sum(), field.speed.mean()
    able = (needs <= field.room) @ field.speed
    scarcity = total / np.where(able > 0, able, total)
    lengths = [task.work / usual / task.devices if task.seconds is None else task.seconds for task in tasks]
    since = np.array([task.since for task in tasks], dtype=np.float64)
    found: Numbers = np.array(lengths, dtype=np.float64) * scarcity + np.maximum(now - since, 0.0)
    return found


def _length(task: Waiting, cost: Numbers) -> Numbers:
    """Seconds of a task on each device. cost: seconds per token."""
    if task.seconds is not None:
        return np.full(len(cost), task.seconds)
    found: Numbers = task.work * cost
    return found
