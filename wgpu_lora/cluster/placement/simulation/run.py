"""The simulation: events in virtual time, and a decision by `place` after each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import thread_time

from wgpu_lora.cluster.placement.place import place
from wgpu_lora.cluster.placement.simulation.bound import lower_bound
from wgpu_lora.cluster.placement.simulation.measured import Measured
from wgpu_lora.cluster.placement.simulation.scenario import Drawn, Machine, Scenario, draw
from wgpu_lora.cluster.placement.simulation.unit import Running
from wgpu_lora.cluster.placement.types import Place, Placement, joined_bytes

END, CRASH, DOWN, UP = range(4)


@dataclass(frozen=True)
class Span:
    """A unit on a device. ended: the tasks whose results it left; the others went on elsewhere."""

    device: str
    tasks: tuple[str, ...]
    needed: int
    begin: float
    end: float
    ended: tuple[str, ...]


@dataclass
class Outcome:
    """How a simulation ended.

    Attributes:
        makespan, bound: seconds until all tasks had ended, and before which they could not; see `lower_bound`.
        work: tokens of all tasks. lost: tokens that were processed again after failures.
        failures: units that failed. joined: tasks that were placed in pipelines.
        decisions: seconds of processor time of each decision, which alone differ from run to run.
    """

    makespan: float
    bound: float
    work: float
    lost: float = 0.0
    failures: int = 0
    joined: int = 0
    spans: list[Span] = field(default_factory=list)
    decisions: list[float] = field(default_factory=list)

    @property
    def lost_share(self) -> float:
        return self.lost / self.work


def simulate(scenario: Scenario, kinds: Sequence[Measured]) -> Outcome:
    """Run a scenario to its end."""
    return _Simulation(scenario, draw(scenario, kinds)).run()


class _Simulation:
    def __init__(self, scenario: Scenario, drawn: Drawn):
        self.scenario, self.drawn = scenario, drawn
        self.machines = {machine.id: machine for machine in drawn.machines}
        self.tasks = {task.task: task for task in drawn.tasks}
        self.waiting = dict(self.tasks)  # by the first task of a unit
        self.left = {task.task: task.work for task in drawn.tasks}
        self.running: dict[str, Running] = {}  # by device
        self.down: set[str] = set()
        self.bases: dict[str, set[str]] = {machine.host: set() for machine in drawn.machines}
        self.events: list[tuple[float, int, str, float]] = [(at, CRASH, device, 0.0) for at, device in drawn.crashes]
        for machine in drawn.machines:
            for begin, end in machine.outages:
                self.events += [(begin, DOWN, machine.id, 0.0), (end, UP, machine.id, 0.0)]
        heapq.heapify(self.events)
        bound = lower_bound(drawn.tasks, drawn.machines, scenario.join)
        self.outcome = Outcome(0.0, bound, sum(task.work for task in drawn.tasks))

    def run(self) -> Outcome:
        now = 0.0
        self._decide(now)
        while self.running or self.waiting:
            if not self.events:
                raise RuntimeError(f"{len(self.waiting)} tasks were never placed")
            now = self.events[0][0]
            changed = False
            while self.events and self.events[0][0] == now:
                changed |= self._happen(*heapq.heappop(self.events))
            if changed:
                self._decide(now)
        self.outcome.makespan = max(span.end for span in self.outcome.spans)
        return self.outcome

    def _happen(self, now: float, event: int, device: str, began: float) -> bool:
        """Follow an event; True if something may be placed now."""
        unit = self.running.get(device)
        if event == END:
            if unit is None or unit.began != began:
                return False  # it had failed before
            del self.running[device]
            self._span(unit, now, tuple(unit.left))
            return True
        if event == UP:
            self.down.discard(device)
            return True
        if event == DOWN:
            self.down.add(device)
        if unit is not None:
            self._fail(unit, now)
        return unit is not None

    def _fail(self, unit: Running, now: float) -> None:
        """The unit goes back to its newest copy, and waits for another device."""
        del self.running[unit.device]
        left, reached = unit.copied(now), unit.trained(now)
        self._span(unit, now, tuple(task for task, tokens in left.items() if not tokens))
        self.outcome.failures += 1
        self.outcome.lost += sum(left.values()) - sum(reached.values())
        members = {task: tokens for task, tokens in left.items() if tokens > 0}
        self.left.update(left)
        first, *others = (self.tasks[task] for task in members)
        needed = {
            name: joined_bytes(first.base_bytes, len(members), max(one.needed[name] for one in (first, *others)))
            for name in first.needed
        }
        fitting = [one for one in self.machines.values() if needed[one.plan_class] <= one.memory]
        self.waiting[first.task] = replace(
            first,
            needed=needed if others else first.needed,
            work=sum(members.values()),
            tasks=tuple(members) if others else (),
            join=first.join if others else "never",
            avoid=frozenset({unit.device}) if len(fitting) > 1 else frozenset(),
            since=now,
        )

    def _span(self, unit: Running, now: float, ended: tuple[str, ...]) -> None:
        self.outcome.spans.append(Span(unit.device, tuple(unit.left), unit.needed, unit.began, now, ended))

    def _decide(self, now: float) -> None:
        waiting = list(self.waiting.values())
        places = [self._place(machine, now) for machine in self.drawn.machines]
        begin = thread_time()
        found = place(waiting, places, now)
        self.outcome.decisions.append(thread_time() - begin)
        for placement in found:
            self._start(placement, now)

    def _place(self, machine: Machine, now: float) -> Place:
        unit = self.running.get(machine.id)
        held = unit.needed if unit else 0
        return Place(
            machine.id,
            machine.plan_class,
            machine.host,
            free=machine.memory - held,
            held=held,
            budget=machine.memory,
            speed=machine.said,
            active=int(unit is not None),
            busy_seconds=unit.end - now if unit else 0.0,
            bases=frozenset(self.bases[machine.host]),
            joined_speedup=machine.kind.joined_speedup,
            out="gone" if machine.id in self.down else "",
        )

    def _start(self, placement: Placement, now: float) -> None:
        machine = self.machines[placement.devices[0]]
        for task in placement.tasks:
            self.waiting.pop(task, None)
        self.bases[machine.host].add(self.tasks[placement.tasks[0]].base)
        unit = Running(
            machine.id,
            {task: self.left[task] for task in placement.tasks},
            placement.needed,
            began=now,
            loading=self.scenario.loading,
            speed=machine.speed,
            gain=max(machine.kind.joined_speedup, 1.0),
            copies=self.scenario.copies,
        )
        self.running[machine.id] = unit
        self.outcome.joined += len(placement.tasks) if len(placement.tasks) > 1 else 0
        heapq.heappush(self.events, (unit.end, END, machine.id, now))
