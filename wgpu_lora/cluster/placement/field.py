"""The devices of a decision as arrays: what fits where, when it would end, and how good a device is for a task."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wgpu_lora.cluster.placement.types import Place, Waiting

LOCAL_BASE, LOCAL_DATA = 0.5, 0.25  # what a host's own base and data add to a score, relative to a host without
UNKNOWN = 1e30  # bytes, if nobody knows how many are free: more than anything needs, but finite
Numbers = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Field:
    """Places in order of their ids, [places] each. A place is *open* if it has room for one more job now.

    Attributes:
        free: bytes that a new job could get now. room: the same once the active jobs have ended.
        ready: seconds until a task that is queued could start. Grows as tasks are queued.
        gap: seconds for which an open place is idle before it is kept for a task of several devices; else infinite.
        gain: tokens/s of a pipeline over its tasks one after another.
        start, cost, limit: when a task would start, seconds per token and bytes for it: now on open places, else later.
    """

    def __init__(self, places: Sequence[Place]):
        self.places = sorted((place for place in places if not place.out), key=lambda place: place.id)
        self.classes = sorted({place.plan_class for place in self.places})
        self.of_class = np.array([self.classes.index(place.plan_class) for place in self.places], dtype=np.intp)
        self.index = {place.id: at for at, place in enumerate(self.places)}
        self.speed = speeds(self.places)
        self.free = np.array([UNKNOWN if p.free is None else p.free for p in self.places], dtype=np.float64)
        self.room = self.free + np.array([place.held for place in self.places], dtype=np.float64)
        self.active = np.array([place.active for place in self.places], dtype=np.float64)
        self.slots = np.array([max(place.jobs_per_device, 1) for place in self.places], dtype=np.float64)
        busy = np.array([place.busy_seconds for place in self.places], dtype=np.float64)
        self.ready = np.where(self.active > 0, busy, 0.0)
        self.gap = np.full(len(self.places), math.inf)
        self.gain = np.array([place.joined_speedup or 1.0 for place in self.places], dtype=np.float64)
        self.start, self.cost, self.limit = self.ready.copy(), self.slots / self.speed, self.room.copy()
        self._kept = False
        self.open = np.zeros(len(self.places), dtype=np.bool_)
        for at in range(len(self.places)):
            self.refresh(at)
        self._local: dict[tuple[str, frozenset[str]], Numbers] = {}

    @property
    def rate(self) -> Numbers:
        """Tokens/s of one more job now."""
        found: Numbers = self.speed / (1.0 + self.active)
        return found

    @property
    def kept(self) -> bool:
        """Whether idle places are kept for tasks of several devices."""
        return self._kept

    def keep(self, at: int, gap: float) -> None:
        """Keep an open place, from `gap` seconds on."""
        self.gap[at] = min(float(self.gap[at]), gap)
        self._kept = True

    def refresh(self, at: int) -> None:
        """Follow a change of `active`, `free` or `ready` of a place."""
        is_open = bool(self.active[at] < self.slots[at])
        self.open[at] = is_open
        self.start[at] = 0.0 if is_open else self.ready[at]
        # What is open shares the device with the jobs that it has; later it has as many as it may.
        self.cost[at] = ((1.0 + self.active[at]) if is_open else self.slots[at]) / self.speed[at]
        self.limit[at] = self.free[at] if is_open else self.room[at]

    def begin(self, at: int, needed: float, end: float) -> None:
        """A job starts now, which ends in `end` seconds."""
        self.ready[at] = end if self.active[at] == 0 else min(float(self.ready[at]), end)
        self.active[at] += 1
        self.free[at] -= needed
        self.refresh(at)

    def needs(self, tasks: Sequence[Waiting]) -> Numbers:
        """Bytes that each task needs on each place [tasks, places]; infinite where it cannot run."""
        by_class = [[task.needed.get(name, math.inf) for name in self.classes] for task in tasks]
        found: Numbers = np.array(by_class, dtype=np.float64).reshape(len(tasks), len(self.classes))[:, self.of_class]
        for row, task in enumerate(tasks):
            if task.avoid:
                found[row, [self.index[name] for name in task.avoid if name in self.index]] = math.inf
        return found

    def scores(self, task: Waiting, need: Numbers) -> Numbers:
        """(free / needed bytes) x tokens/s / (1 + active jobs) x locality, of each place.

        Where the free bytes are unknown, their ratio counts as 1. Locality is 1 + 0.5 if the host has the base
        + 0.25 x the part of the task's data that it has: it decides between similar devices, but does not outweigh one
        of twice the speed. Where the task does not fit, and where it must not go, the score is 0.
        """
        ratio = np.where(self.free >= UNKNOWN / 2, 1.0, self.free / np.maximum(need, 1.0))
        found: Numbers = np.where(need <= self.free, ratio * self.rate * self._locality(task), 0.0)
        found[np.isinf(need)] = 0.0
        return found

    def _locality(self, task: Waiting) -> Numbers:
        key = (task.base, task.data)
        if key not in self._local:
            files = max(len(task.data), 1)
            self._local[key] = np.array(
                [
                    1 + LOCAL_BASE * (task.base in place.bases) + LOCAL_DATA * len(task.data & place.data) / files
                    for place in self.places
                ]
            )
        return self._local[key]


def speeds(places: Sequence[Place]) -> Numbers:
    """Tokens/s of each device; of those not measured, the median of their plan class, or of all, or 1."""
    by_class: dict[str, list[float]] = {}
    for place in places:
        if place.speed:
            by_class.setdefault(place.plan_class, []).append(place.speed)
    known = [speed for found in by_class.values() for speed in found]
    everywhere = float(np.median(known)) if known else 1.0
    usual = {name: float(np.median(found)) for name, found in by_class.items()}
    return np.array([place.speed or usual.get(place.plan_class, everywhere) for place in places], dtype=np.float64)
