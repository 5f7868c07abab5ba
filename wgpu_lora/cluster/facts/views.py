"""What people see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wgpu_lora.cluster.facts.nodes import DeviceFacts, NodeFacts
from wgpu_lora.cluster.facts.orders import Progress
from wgpu_lora.cluster.facts.requests import Sweep


@dataclass(frozen=True)
class TaskView:
    """A task in tables. state: pending, starting, running, moving, finished, failed, cancelled or stopped."""

    run: str
    name: str
    state: str
    device: str | None
    progress: Progress
    output: str
    attempts: int = 1
    said: str = ""
    fetched: bool = False
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceView:
    """A device in tables. state: idle, busy, quarantined or gone."""

    facts: DeviceFacts
    state: str
    units: list[str] = field(default_factory=list)
    tokens_per_second: float | None = None
    failures: int = 0


@dataclass(frozen=True)
class RunView:
    name: str
    by: str
    began: float
    over: bool
    shared: str | None = None
    sweep: Sweep | None = None  # what its tasks are compared by, if it is one


@dataclass(frozen=True)
class Line:
    """Something that happened, such as a move. time: seconds since the epoch."""

    time: float
    text: str


@dataclass(frozen=True)
class Snapshot:
    """All that `cluster status`, `run` and `attach` show. events: the newest lines, oldest first."""

    time: float
    runs: list[RunView]
    tasks: list[TaskView]
    devices: list[DeviceView]
    nodes: list[NodeFacts]
    events: list[Line] = field(default_factory=list)
