"""Which tasks start now, and where: a pure function of what waits and of the devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from wgpu_lora.cluster.placement.adapter_grouping import Grouping, StartingUnit, start_together
from wgpu_lora.cluster.placement.placement_field import CandidateDevice, Field, Numbers, PendingTask, Placement
from wgpu_lora.train.memory import format_bytes, format_bytes_exact

SLACK = 1.1  # how much later than on the best device a task may end on one with a better score


def place(queue: Sequence[PendingTask], candidates: Sequence[CandidateDevice], now: float = 0.0) -> list[Placement]:
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
    before runs on them. How tasks are joined into pipelines is in `Grouping`.

    Args:
        queue: tasks with different names.
        candidates: devices; those that are `out` are not used.
        now: by the clock of `PendingTask.since`, for the time that tasks have waited.

    Returns:
        The placements, in the order in which they were decided.
    """
    field = Field(candidates)
    if not queue or not field.open.any():
        return []
    return _Decision(field, queue, now).placements()


class _Decision:
    def __init__(self, field: Field, queue: Sequence[PendingTask], now: float):
        self.field = field
        tasks = sorted(queue, key=lambda task: task.task)
        needs = field.needs(tasks)
        order = np.argsort(-ranks(field, tasks, needs, now), kind="stable")
        self.tasks = [(tasks[row], needs[row]) for row in order]
        # Devices on which nothing fits now do not keep the planning going.
        self.useful = (needs <= field.free).any(axis=0)
        self.grouping = Grouping(field, self.tasks)
        self.units: list[Placement | StartingUnit] = []

    def placements(self) -> list[Placement]:
        field, grouping = self.field, self.grouping
        waits = (self.useful & field.open).any()
        for task, need in self.tasks:
            if not grouping.next(task):
                continue
            if task.devices > 1:
                together = start_together(field, task, need, SLACK)
                if together:
                    self.units.append(together)
                is_started = together is not None
            else:
                is_started = self._place_single(task, need)
            if is_started:
                waits = (self.useful & field.open).any()
            if not waits and not grouping.may_grow():
                break
        return [unit if isinstance(unit, Placement) else unit.placement(field) for unit in self.units]

    def _place_single(self, task: PendingTask, need: Numbers) -> bool:
        """Start, join or queue a task of one device; True if it starts a unit."""
        field = self.field
        start, length = field.start, _length(task, field.cost)
        if field.has_gaps:
            start = np.where(field.open & (length > field.gap), field.ready, start)
        ends = np.where(need <= field.limit, start + length, math.inf)
        at = int(ends.argmin())
        best = float(ends[at])
        if best == math.inf:
            return False  # it waits for memory or a device of which nobody knows when it is free
        eligible = (start == 0.0) & field.open & (ends <= SLACK * best)
        if eligible.any():
            scores = np.where(eligible, field.scores(task, need), -1.0)
            at = int(scores.argmax())
            field.begin(at, float(need[at]), float(ends[at]))
            self.units.append(self.grouping.start(task, at, int(need[at]), float(scores[at])))
            return True
        if not (task.joinable and self.grouping.join(task, need, SLACK * best)):
            field.ready[at] += length[at] / field.slots[at]
            field.refresh(at)
        return False


def ranks(field: Field, tasks: Sequence[PendingTask], needs: Numbers, now: float) -> Numbers:
    """How early each task is planned [tasks]: by length, scarcity of memory and the time waited; see `place`."""
    total, mean = field.speed.sum(), field.speed.mean()
    usable_speed = (needs <= field.room) @ field.speed
    scarcity = total / np.where(usable_speed > 0, usable_speed, total)
    lengths = [task.work / mean / task.devices if task.seconds is None else task.seconds for task in tasks]
    since = np.array([task.since for task in tasks], dtype=np.float64)
    result: Numbers = np.array(lengths, dtype=np.float64) * scarcity + np.maximum(now - since, 0.0)
    return result


def _length(task: PendingTask, cost: Numbers) -> Numbers:
    """Seconds of a task on each device. cost: seconds per token."""
    if task.seconds is not None:
        return np.full(len(cost), task.seconds)
    seconds: Numbers = task.work * cost
    return seconds


def refusal(
    task: str, peak_bytes: Mapping[str, int], candidates: Sequence[CandidateDevice], devices: int = 1
) -> str | None:
    """Why a task can never run on these devices, in a sentence; None if it can, now or once they are idle.

    Args:
        task: its name. peak_bytes: by plan class; without those of devices that cannot run it at all.
        candidates: all devices of the cluster, those that are `out`, too.
        devices: how many it trains on together.
    """
    of_class = [candidate for candidate in candidates if candidate.plan_class in peak_bytes]
    fitting = [candidate for candidate in of_class if peak_bytes[candidate.plan_class] <= _max_bytes(candidate)]
    usable = [candidate for candidate in fitting if not candidate.out]
    if len(usable) >= devices:
        return None
    if not candidates:
        return f"Adapter '{task}' cannot run: the cluster has no device."
    if not of_class:
        return f"Adapter '{task}' cannot run on any of the cluster's devices."
    if devices > 1 and usable:
        return f"Adapter '{task}' needs {devices} devices that have the memory, but there are {len(usable)}."
    if fitting:
        out = max(fitting, key=lambda candidate: (_max_bytes(candidate), candidate.id))
        return f"Adapter '{task}' fits only on devices that are out of use, such as {_label(out)}, which is {out.out}."
    nearest = max(
        of_class, key=lambda candidate: (_max_bytes(candidate) / peak_bytes[candidate.plan_class], candidate.id)
    )
    return (
        f"Adapter '{task}' needs {format_bytes_exact(peak_bytes[nearest.plan_class])} of device memory, but the "
        f"nearest device, {_label(nearest)}, has {format_bytes(int(_max_bytes(nearest)))}."
    )


def _max_bytes(candidate: CandidateDevice) -> float:
    """Bytes that a job could ever get on a device."""
    return math.inf if candidate.budget is None else candidate.budget


def _label(candidate: CandidateDevice) -> str:
    return candidate.name or candidate.id
