"""Tasks, devices and placements, and the devices of a decision as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

# Tasks of a new pipeline: its speed-up is measured with three, and it moves as a whole if a device fails.
MOST_JOINED = 4


@dataclass(frozen=True)
class PendingTask:
    """A task, or a unit of several, that waits for a device.

    Attributes:
        task: unique among all that waits.
        peak_bytes: bytes at the peak, by plan class; of the whole unit, if it is one. It cannot run on other classes.
        base: equal for tasks that may share a base model in one pipeline. base_bytes: what they would share.
        work: processed tokens that are left.
        data: what its files are, for locality.
        avoid: ids of devices that it must not go to.
        devices: distinct devices that train it together; each needs the whole memory.
        tasks: members of a unit that was placed before: they move together, and none joins them.
        run: only tasks of one run are joined.
        join: one of `cluster_file.JOIN`: `auto` joins where that is measured to be faster, `always` everywhere.
        seconds: of a task that ends by time, on any device; its `work` does not count.
        since: when it could first have been placed, in seconds. Who waits long goes before more work.
    """

    task: str
    peak_bytes: Mapping[str, int]
    base: str = ""
    base_bytes: int = 0
    work: float = 0.0
    data: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    devices: int = 1
    tasks: tuple[str, ...] = ()
    run: str = ""
    join: str = "auto"
    seconds: float | None = None
    since: float = 0.0

    @property
    def members(self) -> tuple[str, ...]:
        return self.tasks or (self.task,)

    @property
    def group(self) -> tuple[str, str]:
        """Equal for tasks that may be in one pipeline."""
        return self.run, self.base

    @property
    def joinable(self) -> bool:
        """Whether it may be in a new pipeline."""
        return self.join != "never" and self.devices == 1 and not self.tasks and self.seconds is None


@dataclass(frozen=True)
class CandidateDevice:
    """A device, and what it does.

    Attributes:
        id: unique in the cluster. name: for people, with its host.
        free: bytes that a new job could get now; None if unknown, which counts as enough.
        active_bytes: bytes that its active jobs hold, which are free when they have ended.
        budget: bytes that it has when nothing runs, for refusals; None if unknown.
        speed: measured tokens/s; None if not measured: it then counts as the median of those that are, first of its
            plan class, then of all.
        active: jobs of the cluster on it. jobs_per_device: how many it may have.
        busy_seconds: until the first of them ends; infinite if unknown.
        bases, data: what its host has already.
        joined_speedup: tokens/s of several adapters in one pipeline over one after another; None if not measured.
        out: why nothing may be placed on it, such as `quarantined` or `gone`; empty if something may.
    """

    id: str
    plan_class: str
    host: str = ""
    free: int | None = None
    speed: float | None = None
    active: int = 0
    busy_seconds: float = 0.0
    bases: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    joined_speedup: float | None = None
    jobs_per_device: int = 1
    active_bytes: int = 0
    budget: int | None = None
    name: str = ""
    out: str = ""


@dataclass(frozen=True)
class Placement:
    """Tasks to start now: a pipeline if there are several. devices: the first one leads if there are several."""

    tasks: tuple[str, ...]
    devices: tuple[str, ...]
    score: float
    peak_bytes: int = field(default=0, compare=False)  # bytes on each device


def joined_bytes(base_bytes: int, count: int, largest: int) -> int:
    """Bytes of a pipeline of `count` tasks on one base, of which the largest needs `largest` bytes alone.

    At least those of its exact plan: each slot is as large as the largest, and activations are shared, too.
    """
    return base_bytes + count * max(largest - base_bytes, 0)


LOCAL_BASE, LOCAL_DATA = 0.5, 0.25  # what a host's own base and data add to a score, relative to a host without
UNKNOWN = 1e30  # bytes, if nobody knows how many are free: more than anything needs, but finite
Numbers = npt.NDArray[np.float64]


class Field:
    """Candidates in order of their ids, [candidates] each. A candidate is *open* if it has room for one more job now.

    Attributes:
        free: bytes that a new job could get now. room: the same once the active jobs have ended.
        ready: seconds until a task that is queued could start. Grows as tasks are queued.
        gap: seconds for which an open candidate is idle before it is reserved for a task of several devices; else
            infinite.
        has_gaps: whether any candidate is reserved in this way.
        gain: tokens/s of a pipeline over its tasks one after another.
        start, cost, limit: when a task would start, seconds per token and bytes for it: now on open candidates,
            else later.
    """

    def __init__(self, candidates: Sequence[CandidateDevice]):
        self.candidates = sorted(
            (candidate for candidate in candidates if not candidate.out), key=lambda candidate: candidate.id
        )
        self.classes = sorted({candidate.plan_class for candidate in self.candidates})
        self.of_class = np.array(
            [self.classes.index(candidate.plan_class) for candidate in self.candidates], dtype=np.intp
        )
        self.index = {candidate.id: at for at, candidate in enumerate(self.candidates)}
        self.speed = speeds(self.candidates)
        self.free = np.array([UNKNOWN if p.free is None else p.free for p in self.candidates], dtype=np.float64)
        self.room = self.free + np.array([candidate.active_bytes for candidate in self.candidates], dtype=np.float64)
        self.active = np.array([candidate.active for candidate in self.candidates], dtype=np.float64)
        self.slots = np.array([max(candidate.jobs_per_device, 1) for candidate in self.candidates], dtype=np.float64)
        busy = np.array([candidate.busy_seconds for candidate in self.candidates], dtype=np.float64)
        self.ready = np.where(self.active > 0, busy, 0.0)
        self.gap = np.full(len(self.candidates), math.inf)
        self.gain = np.array([candidate.joined_speedup or 1.0 for candidate in self.candidates], dtype=np.float64)
        self.start, self.cost, self.limit = self.ready.copy(), self.slots / self.speed, self.room.copy()
        self.has_gaps = False
        self.open = np.zeros(len(self.candidates), dtype=np.bool_)
        for at in range(len(self.candidates)):
            self.refresh(at)
        self._local: dict[tuple[str, frozenset[str]], Numbers] = {}

    @property
    def rate(self) -> Numbers:
        """Tokens/s of one more job now."""
        rates: Numbers = self.speed / (1.0 + self.active)
        return rates

    def keep(self, at: int, gap: float) -> None:
        """Reserve an open candidate, from `gap` seconds on."""
        self.gap[at] = min(float(self.gap[at]), gap)
        self.has_gaps = True

    def refresh(self, at: int) -> None:
        """Follow a change of `active`, `free` or `ready` of a candidate."""
        is_open = bool(self.active[at] < self.slots[at])
        self.open[at] = is_open
        self.start[at] = 0.0 if is_open else self.ready[at]
        # What is open shares the device with the jobs that it has; later it has as many as it may.
        self.cost[at] = ((1.0 + self.active[at]) if is_open else self.slots[at]) / self.speed[at]
        self.limit[at] = self.free[at] if is_open else self.room[at]

    def begin(self, at: int, peak_bytes: float, end: float) -> None:
        """A job starts now, which ends in `end` seconds."""
        self.ready[at] = end if self.active[at] == 0 else min(float(self.ready[at]), end)
        self.active[at] += 1
        self.free[at] -= peak_bytes
        self.refresh(at)

    def needs(self, tasks: Sequence[PendingTask]) -> Numbers:
        """Bytes that each task needs on each candidate [tasks, candidates]; infinite where it cannot run."""
        by_class = [[task.peak_bytes.get(name, math.inf) for name in self.classes] for task in tasks]
        needs: Numbers = np.array(by_class, dtype=np.float64).reshape(len(tasks), len(self.classes))[:, self.of_class]
        for row, task in enumerate(tasks):
            if task.avoid:
                needs[row, [self.index[name] for name in task.avoid if name in self.index]] = math.inf
        return needs

    def scores(self, task: PendingTask, need: Numbers) -> Numbers:
        """(free / needed bytes) x tokens/s / (1 + active jobs) x locality, of each candidate.

        Where the free bytes are unknown, their ratio counts as 1. Locality is 1 + 0.5 if the host has the base
        + 0.25 x the part of the task's data that it has: it decides between similar devices, but does not outweigh one
        of twice the speed. Where the task does not fit, and where it must not go, the score is 0.
        """
        ratio = np.where(self.free >= UNKNOWN / 2, 1.0, self.free / np.maximum(need, 1.0))
        scores: Numbers = np.where(need <= self.free, ratio * self.rate * self._locality(task), 0.0)
        scores[np.isinf(need)] = 0.0
        return scores

    def _locality(self, task: PendingTask) -> Numbers:
        key = (task.base, task.data)
        if key not in self._local:
            files = max(len(task.data), 1)
            self._local[key] = np.array(
                [
                    1
                    + LOCAL_BASE * (task.base in candidate.bases)
                    + LOCAL_DATA * len(task.data & candidate.data) / files
                    for candidate in self.candidates
                ]
            )
        return self._local[key]


def speeds(candidates: Sequence[CandidateDevice]) -> Numbers:
    """Tokens/s of each device; of those not measured, the median of their plan class, or of all, or 1."""
    by_class: dict[str, list[float]] = {}
    for candidate in candidates:
        if candidate.speed:
            by_class.setdefault(candidate.plan_class, []).append(candidate.speed)
    measurements = [speed for class_speeds in by_class.values() for speed in class_speeds]
    overall = float(np.median(measurements)) if measurements else 1.0
    class_medians = {name: float(np.median(class_speeds)) for name, class_speeds in by_class.items()}
    return np.array(
        [candidate.speed or class_medians.get(candidate.plan_class, overall) for candidate in candidates],
        dtype=np.float64,
    )
