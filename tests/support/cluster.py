"""A made-up cluster for the coordinator's state machine: devices, runs, and what devices report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wgpu_lora.cluster.coordinator.board import Board
from wgpu_lora.cluster.coordinator.state import State, TaskState
from wgpu_lora.cluster.coordinator.sweeping import Schedulers

from wgpu_lora.cluster.messages import (
    Answer,
    Copy,
    DeviceFacts,
    NodeFacts,
    Order,
    Progress,
    Report,
    RunRequest,
    RunRequirements,
    Snapshot,
    Task,
    Versions,
    from_plain,
    to_plain,
)

CLASS = "class"  # the plan class of all devices
VERSIONS = Versions("0", "code", "shaders", "3.11", "2.60", "0.32")


def device(address: str, key: str, **changes: Any) -> DeviceFacts:
    """A device of a host."""
    facts = DeviceFacts(key, address, 0, key, "driver", "gpu", "Vulkan", CLASS, budget=1000, free=1000, speed=1.0)
    return replace(facts, **changes)


def task(name: str, **options: Any) -> Task:
    return Task(name, options, f"out/{name}")


def request(name: str, tasks: list[Task], *, needed: int = 40, steps: int = 100, **changes: Any) -> RunRequest:
    """A run whose tasks all need the same."""
    plan = RunRequirements(needed, base_bytes=20, base="base", data=["rows"], work=1000, steps=steps, heldout=True)
    return RunRequest(name, tasks, {one.name: {CLASS: plan} for one in tasks}, **changes)


class Cluster:
    """A board, its clock, and the hosts that it can see; `a` is the coordinator's."""

    def __init__(self, hosts: Mapping[str, list[DeviceFacts]], schedulers: Schedulers | None = None):
        self.hosts, self.now, self.schedulers = dict(hosts), 1000.0, schedulers
        self.board = Board(node="node-a", schedulers=schedulers)
        self.survey(*hosts)

    def survey(self, *names: str, more: Mapping[str, list[DeviceFacts]] | None = None) -> None:
        """The coordinator sees these hosts, and no others."""
        self.hosts |= more or {}
        nodes = [NodeFacts(f"node-{name}", name, name, VERSIONS, self.hosts[name]) for name in names]
        self.board.surveyed(nodes, self.now)

    def submit(self, asked: RunRequest) -> None:
        self.board.submit(asked, self.now)

    def advance(self, seconds: float) -> None:
        """Let time pass in which nothing is heard."""
        self.decide(seconds)

    def decide(self, seconds: float = 0.0) -> list[tuple[str, Order]]:
        self.now += seconds
        return self.board.decide(self.now)

    def copy(
        self, order: Order, step: int, *, final: bool = False, steps: dict[str, int] | None = None, epoch: int = 0
    ) -> Copy:
        """A copy of a unit in which all tasks have taken that many steps."""
        steps = steps or {one.name: step for one in order.tasks}
        digest = f"{order.epoch}-{step}"
        return Copy(order.unit, epoch or order.epoch, digest, steps, 1, final, order.shelf or "node-a")

    def report(
        self,
        order: Order,
        *,
        step: int,
        loss: float | None = None,
        copy: int | None = None,
        final: bool = False,
        outcomes: dict[str, str] | None = None,
        ended: str | None = None,
        said: str = "",
    ) -> Answer:
        """What a device tells of an order, the tasks of which have all taken that many steps."""
        progress = {one.name: Progress(step, 100, loss=loss) for one in order.tasks}
        made = None if copy is None else self.copy(order, copy, final=final)
        told = Report(order.unit, order.epoch, progress, {}, made, outcomes or {}, ended, said)
        return self.board.report(told, self.now)

    def fence(self, unit: str, *held: Copy) -> None:
        """Shelves have refused further copies of a lost unit, and hold these."""
        self.board.fenced(unit, dict(self.board.to_fence())[unit], held, self.now)

    def saved(self) -> str:
        """What the coordinator writes now."""
        return json.dumps(to_plain(self.board.state))

    def restart(self, saved: str | None = None) -> None:
        """The coordinator is killed and goes on with what it wrote."""
        state = from_plain(State, json.loads(saved or self.saved()))
        self.board = Board(state, self.board.requests, node="node-a", schedulers=self.schedulers)
        self.board.restarted(self.now)

    def task(self, run: str, name: str) -> TaskState:
        return self.board.state.tasks[f"{run}/{name}"]

    def snapshot(self) -> Snapshot:
        return self.board.snapshot(None, self.now)
