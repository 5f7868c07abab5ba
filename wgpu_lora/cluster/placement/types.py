"""What placement decides from, and its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

JOINS = ("auto", "always", "never")
MOST_JOINED = (
    4  # tasks of a new pipeline: its speed-up is measured with three, and it moves as a whole if a device fails
)


@dataclass(frozen=True)
class Waiting:
    """A task, or a unit of several, that waits for a device.

    Attributes:
        task: unique among all that waits.
        needed: bytes at the peak, by plan class; of the whole unit, if it is one. It cannot run on other classes.
        base: equal for tasks that may share a base model in one pipeline. base_bytes: what they would share.
        work: processed tokens that are left.
        data: what its files are, for locality.
        avoid: ids of devices that it must not go to.
        devices: distinct devices that train it together; each needs the whole memory.
        tasks: members of a unit that was placed before: they move together, and none joins them.
        run: only tasks of one run are joined.
        join: one of JOINS: `auto` joins where that is measured to be faster, `always` everywhere.
        seconds: of a task that ends by time, on any device; its `work` does not count.
        since: when it could first have been placed, in seconds. Who waits long goes before more work.
    """

    task: str
    needed: Mapping[str, int]
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
class Place:
    """A device, and what it does.

    Attributes:
        id: unique in the cluster. name: for people, with its host.
        free: bytes that a new job could get now; None if unknown, which counts as enough.
        held: bytes that its active jobs hold, which are free when they have ended.
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
    held: int = 0
    budget: int | None = None
    name: str = ""
    out: str = ""


@dataclass(frozen=True)
class Placement:
    """Tasks to start now: a pipeline if there are several. devices: the first one leads if there are several."""

    tasks: tuple[str, ...]
    devices: tuple[str, ...]
    score: float
    needed: int = field(default=0, compare=False)  # bytes on each device


def joined_bytes(base_bytes: int, count: int, largest: int) -> int:
    """Bytes of a pipeline of `count` tasks on one base, of which the largest needs `largest` bytes alone.

    At least those of its exact plan: each slot is as large as the largest, and activations are shared, too.
    """
    return base_bytes + count * max(largest - base_bytes, 0)
