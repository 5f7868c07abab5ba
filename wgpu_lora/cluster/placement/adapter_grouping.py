"""Tasks that start together: pipelines of one base on a device, and one task on several devices."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from wgpu_lora.cluster.placement.placement_field import (
    MOST_JOINED,
    Field,
    Numbers,
    PendingTask,
    Placement,
    joined_bytes,
)

EVEN = 0.5  # of the time that all work takes: tasks joined at once. With 1, clusters that fail end up to 10% later
MOST_LOOKED_AT = 4 * MOST_JOINED  # tasks, for members of a unit: those further on are much shorter


@dataclass
class StartingUnit:
    """A unit that starts now. at: its device. free: bytes there before it. cost: seconds per token if joined.

    largest: bytes of its largest task alone. peak_bytes: bytes of all. end: seconds until it has ended.
    """

    members: list[PendingTask]
    at: int
    score: float
    free: float
    cost: float
    work: float
    largest: int
    peak_bytes: int
    end: float

    def placement(self, field: Field) -> Placement:
        names = tuple(name for task in self.members for name in task.members)
        return Placement(names, (field.candidates[self.at].id,), self.score, self.peak_bytes)


class Grouping:
    """The units that start in a decision, and which tasks are joined in them.

    Tasks are joined where pipelines are faster, and where that leaves no device idle. With much to do, a unit takes the
    next tasks of its group, which are about as long, as far as it then ends within half the time that all devices would
    take if they shared all the work evenly: the other half levels out what fails. With few tasks left, one that would
    have to wait for a busy device joins a unit of its group that starts now, if it ends as early there.

    Args:
        tasks: what is planned, in order, with the bytes that it needs on each candidate.
    """

    def __init__(self, field: Field, tasks: Sequence[tuple[PendingTask, Numbers]]):
        self._field = field
        self._growing: dict[tuple[str, str], list[StartingUnit]] = {}
        self._remaining = len(tasks)
        self._members: set[str] = set()
        self._queues: dict[tuple[str, str], deque[tuple[PendingTask, Numbers]]] = {}
        for task, need in tasks:
            if task.joinable:
                self._queues.setdefault(task.group, deque()).append((task, need))
        mean_speed = float(field.speed.mean())
        work = sum(task.work if task.seconds is None else task.seconds * mean_speed for task, _ in tasks)
        busy = np.where(np.isfinite(field.ready), field.ready, 0.0)
        self._even = float((work + busy @ field.speed) / field.speed.sum())  # seconds, shared evenly

    def next(self, task: PendingTask) -> bool:
        """Whether a task is still to be planned, which is done now."""
        self._remaining -= 1
        if task.task in self._members:
            return False
        if task.joinable:
            queue = self._queues[task.group]
            while queue and queue[0][0].task in self._members:
                queue.popleft()
            queue.popleft()
        return True

    def may_grow(self) -> bool:
        """Whether the tasks that are left are so few that they are worth planning, in order to join them."""
        return self._remaining <= MOST_JOINED * len(self._field.candidates) and any(
            units and self._queues[group] for group, units in self._growing.items()
        )

    def start(self, task: PendingTask, at: int, peak_bytes: int, score: float) -> StartingUnit:
        """A unit, of a task that the field knows to have begun, and of those that are joined at once."""
        field = self._field
        gain = float(field.gain[at])
        end, free = float(field.ready[at]), float(field.free[at]) + peak_bytes
        cost = 1.0 / (float(field.speed[at]) * max(gain, 1.0))
        unit = StartingUnit([task], at, score, free, cost, task.work, peak_bytes, peak_bytes, end)
        # Where several jobs share a device, nobody has measured what joining them gives.
        if task.joinable and field.slots[at] == 1 and (task.join == "always" or gain > 1.0):
            self._growing.setdefault(task.group, []).append(unit)
            self._fill(unit, self._queues[task.group])
        return unit

    def _fill(self, unit: StartingUnit, queue: Iterable[tuple[PendingTask, Numbers]]) -> None:
        for task, need in list(islice(queue, MOST_LOOKED_AT)):
            if len(unit.members) == MOST_JOINED or (unit.work + task.work) * unit.cost > EVEN * self._even:
                break
            if task.task not in self._members and self._fits(unit, task, need):
                self._add(unit, task, need)
                self._members.add(task.task)

    def join(self, task: PendingTask, need: Numbers, latest: float) -> bool:
        """Add a task to the unit of its group where it ends first, unless that is later than `latest` seconds."""
        best: StartingUnit | None = None
        first = latest
        for unit in self._growing.get(task.group, ()):
            end = (unit.work + task.work) * unit.cost
            if end <= first and self._fits(unit, task, need):
                best, first = unit, end
        if best is not None:
            self._add(best, task, need)
        return best is not None

    def _add(self, unit: StartingUnit, task: PendingTask, need: Numbers) -> None:
        unit.members.append(task)
        unit.work += task.work
        unit.largest = max(unit.largest, int(need[unit.at]))
        unit.peak_bytes = joined_bytes(task.base_bytes, len(unit.members), unit.largest)
        field, end = self._field, unit.work * unit.cost
        field.free[unit.at] = unit.free - unit.peak_bytes
        field.ready[unit.at] += end - unit.end  # for what is queued behind it
        field.refresh(unit.at)
        unit.end = end
        if len(unit.members) == MOST_JOINED:
            self._growing[task.group].remove(unit)

    @staticmethod
    def _fits(unit: StartingUnit, task: PendingTask, need: Numbers) -> bool:
        peak_bytes = float(need[unit.at])
        if peak_bytes == math.inf:
            return False
        return joined_bytes(task.base_bytes, len(unit.members) + 1, max(unit.largest, int(peak_bytes))) <= unit.free


def start_together(field: Field, task: PendingTask, need: Numbers, slack: float) -> Placement | None:
    """Start a task on `task.devices` devices, or keep devices for it.

    Devices take shares by their speed, so the task's speed is their sum. It starts now if it ends at most `slack`
    times later than if it waited for faster devices.

    Returns:
        The placement, or None if the task waits: the devices where it ends first are then kept for it.
    """
    # Devices that are kept for another such task are idle, but free only when they have run it.
    now = field.open & (need <= field.free) & np.isinf(field.gap)
    begins = np.where(now, 0.0, np.where((need <= field.room) & np.isfinite(need), field.ready, math.inf))
    best = _earliest(field, task, begins)
    if best is None:
        return None
    end, start, indices = best
    if now.sum() >= task.devices:
        scores = field.scores(task, need)
        by_score = np.argsort(np.where(now, -scores, math.inf), kind="stable")
        by_speed = np.argsort(np.where(now, -field.rate, math.inf), kind="stable")
        for order in (by_score, by_speed):
            devices = [int(at) for at in order[: task.devices]]
            if _seconds(task, field.rate[devices]) <= slack * end:
                return _start(field, task, devices, need, scores)
    for at in indices:
        if now[at]:
            field.keep(at, start)
        field.ready[at] = end
        field.refresh(at)
    return None


def _earliest(field: Field, task: PendingTask, begins: Numbers) -> tuple[float, float, list[int]] | None:
    """The end, the start and the devices with which the task ends first."""
    order = [int(at) for at in np.argsort(begins, kind="stable") if math.isfinite(begins[at])]
    share = field.speed / field.slots
    best: tuple[float, float, list[int]] | None = None
    for count in range(task.devices, len(order) + 1):
        start = float(begins[order[count - 1]])
        indices = sorted(order[:count], key=lambda at: (-share[at], at))[: task.devices]
        end = start + _seconds(task, share[indices])
        if best is None or end < best[0]:
            best = end, start, indices
    return best


def _seconds(task: PendingTask, rates: Numbers) -> float:
    return task.seconds if task.seconds is not None else task.work / float(rates.sum())


def _start(field: Field, task: PendingTask, devices: list[int], need: Numbers, scores: Numbers) -> Placement:
    """The fastest device leads."""
    devices = sorted(devices, key=lambda at: (-field.speed[at], at))
    seconds = _seconds(task, field.rate[devices])
    for at in devices:
        field.begin(at, float(need[at]), seconds)
    names = tuple(field.candidates[at].id for at in devices)
    return Placement(task.members, names, float(scores[devices].mean()), int(need[devices].max()))
