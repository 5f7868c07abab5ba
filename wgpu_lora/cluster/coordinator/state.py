"""What a coordinator knows, as JSON values: tasks, the units that train them, and devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from wgpu_lora.cluster.facts import Copy, DeviceFacts, Line, NodeFacts, Progress, RunRequest

LEASE_SECONDS = 30.0
# For clocks of unlike rates, and for the kill itself; Board says why clocks need not agree otherwise.
MARGIN_SECONDS = 5.0
MOST_EVENTS = 200
OVER = ("finished", "stopped", "failed", "cancelled")


@dataclass
class TaskState:
    """A task of a run.

    Attributes:
        state: pending, starting, running, moving, or one of OVER, which it becomes when its results can be fetched.
        outcome: of a pipeline's task that has ended before the others, as its worker named it.
        ending: why it is to end: `stopped` (by the sweep) or `cancelled`; empty if it is not.
        attempts: how often its unit was placed. since: when it began to wait.
        failed_on: ids of devices on which its process has failed since its newest copy. killed: likewise, how often it
            was killed from outside.
        alone: it is joined with no others any more.
        kept: its progress when its newest copy was made.
        results: it has a result, or a checkpoint, in the newest copy of its unit. fetched: which the driver or the
            shared folder has.
        asked: the newest step and value that the sweep's scheduler has seen.
    """

    run: str
    name: str
    unit: str
    state: str = "pending"
    progress: Progress = field(default_factory=Progress)
    kept: Progress = field(default_factory=Progress)
    outcome: str = ""
    ending: str = ""
    attempts: int = 0
    since: float = 0.0
    failed_on: list[str] = field(default_factory=list)
    killed: int = 0
    alone: bool = False
    device: str | None = None
    said: str = ""
    results: bool = False
    fetched: bool = False
    asked: list[float] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"{self.run}/{self.name}"

    @property
    def over(self) -> bool:
        return self.state in OVER


@dataclass
class UnitState:
    """The tasks that one process trains. Every task that is not over is in exactly one.

    Attributes:
        tasks: names, the first of which names the unit.
        phase: `waiting` for a device; `placed`, a process may run until `expires`; `lost`, none can run any more, and
            the shelves are asked to refuse what it may still send; `done`.
        epoch: the newest one; 0 if never placed. answered: whether its device was allowed to start a process.
        devices: ids while it is placed, the leader first. needed: bytes on each.
        lease: seconds that its order names; a coordinator that comes later may have another one.
        copy: the newest copy of its directory. at: the address of the host that has it.
        sought: other shelves have been asked for it since that host has been away.
        unreadable: digests of copies that could not be resumed from.
        avoid: devices without room for it -> until when they are not tried again.
    """

    id: str
    run: str
    tasks: list[str]
    phase: str = "waiting"
    epoch: int = 0
    answered: bool = False
    devices: list[str] = field(default_factory=list)
    needed: int = 0
    expires: float = 0.0
    lease: float = LEASE_SECONDS
    copy: Copy | None = None
    at: str = ""
    sought: bool = False
    unreadable: list[str] = field(default_factory=list)
    avoid: dict[str, float] = field(default_factory=dict)


@dataclass
class DeviceState:
    """A device.

    Attributes:
        facts: of its last survey. node: Ray's id of its node then.
        free: bytes that a new job could get: those of the survey less what was placed since.
        gone: it was not in the last survey.
        speed, joined_speedup: measured since; a host does not keep, and tell, what it measured beside other programs.
        measuring: until when that goes on, at most. again: when it may be measured again.
        failures: units in a row that failed on it without a new copy; two are a quarantine.
    """

    facts: DeviceFacts
    node: str
    free: int | None = None
    gone: bool = False
    speed: float | None = None
    joined_speedup: float | None = None
    measuring: float = 0.0
    again: float = 0.0
    failures: int = 0
    quarantined: bool = False

    @property
    def out(self) -> str:
        """Why nothing may be placed on it."""
        return "gone" if self.gone else "quarantined" if self.quarantined else ""


@dataclass
class RunState:
    """A run. began, ended: seconds since 1970; ended is 0 while it goes on. scheduler: the state of the sweep's."""

    name: str
    began: float
    ended: float = 0.0
    scheduler: dict[str, Any] | None = None


@dataclass
class CacheState:
    """The teacher caches of some tasks of a run, which its evaluation device makes.

    Attributes:
        phase: `waiting`, `making`, `ready`, or `failed` for good, after which its tasks have live teachers.
        attempt: counts from 1. parcels: see CacheStanding. at: the addresses of the hosts that have them.
        rows, total: progress. failures: of the process in a row without more rows. misses: likewise, of its device to
            answer or to have room. not_before: when it may be tried again. said: why it is not made.
    """

    run: str
    name: str
    phase: str = "waiting"
    attempt: int = 0
    parcels: dict[str, str] = field(default_factory=dict)
    at: list[str] = field(default_factory=list)
    rows: int = 0
    total: int = 0
    failures: int = 0
    misses: int = 0
    not_before: float = 0.0
    said: str = ""

    @property
    def id(self) -> str:
        return f"{self.run}/{self.name}"


@dataclass
class HostState:
    """What a host has had, by its address: base models and data that are probably in its caches. node: Ray's id."""

    node: str = ""
    bases: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)


@dataclass
class State:
    """All of it. Runs' requests, which do not change, are beside it.

    Attributes:
        tasks: by id, `<run>/<name>`. units: by id. epochs: the newest epoch of each id that ever was a unit's.
        nodes: of the last survey. hosts: by address, also those that have gone. caches: of teachers, by id.
    """

    runs: dict[str, RunState] = field(default_factory=dict)
    tasks: dict[str, TaskState] = field(default_factory=dict)
    units: dict[str, UnitState] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    devices: dict[str, DeviceState] = field(default_factory=dict)
    nodes: list[NodeFacts] = field(default_factory=list)
    hosts: dict[str, HostState] = field(default_factory=dict)
    caches: dict[str, CacheState] = field(default_factory=dict)
    events: list[Line] = field(default_factory=list)

    def members(self, unit: UnitState) -> list[TaskState]:
        return [self.tasks[f"{unit.run}/{name}"] for name in unit.tasks]

    def placed(self) -> Iterator[UnitState]:
        return (unit for unit in self.units.values() if unit.phase == "placed")

    def say(self, now: float, text: str) -> None:
        """Add a line to the events, of which only the newest are kept."""
        self.events.append(Line(now, text))
        del self.events[:-MOST_EVENTS]

    def address(self, node: str) -> str:
        """The address of a node, also of one that has gone; empty if it was never seen."""
        return next((address for address, host in self.hosts.items() if host.node == node), "")

    def node_at(self, address: str) -> str | None:
        """The id of the living node at an address."""
        return next((node.id for node in self.nodes if node.address == address), None)

    def called(self, device: str) -> str:
        """A device's name and host, for people."""
        found = self.devices.get(device)
        if found is None:
            return device
        host = next((node.host for node in self.nodes if node.address == found.facts.address), found.facts.address)
        return f"{found.facts.name} on {host}"


Requests = dict[str, RunRequest]
