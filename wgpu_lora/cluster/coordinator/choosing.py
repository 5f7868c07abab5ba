"""What placement is told of a coordinator's state: what waits, and the devices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wgpu_lora.cluster.coordinator.state import Requests, State, TaskState, UnitState
from wgpu_lora.cluster.coordinator.taught import awaited, plans_of
from wgpu_lora.cluster.facts import RunRequest, RunRequirements
from wgpu_lora.cluster.placement.refuse import refusal
from wgpu_lora.cluster.placement.types import Place, Waiting, joined_bytes

MEASURED_SECONDS = 10.0  # that measuring a device usually takes


def needed_bytes(plans: Sequence[dict[str, RunRequirements]]) -> dict[str, int]:
    """Bytes of a unit of tasks, by the plan classes on which all of them can run."""
    found = {}
    for name in set.intersection(*(set(plan) for plan in plans)):
        ours = [plan[name] for plan in plans]
        if any(plan.refused for plan in ours):
            continue
        most = max(plan.needed for plan in ours)
        base = min(plan.base_bytes for plan in ours)
        found[name] = most if len(ours) == 1 else joined_bytes(base, len(ours), most)
    return found


class Queue:
    """What waits. Most units have never been placed, and are the same at each decision: they are described once."""

    def __init__(self) -> None:
        self._new: dict[str, tuple[RunRequest, bool, Waiting]] = {}

    def waiting(self, state: State, requests: Requests, now: float) -> list[Waiting]:
        """All units that wait for a device, whose copy is within reach, and whose teacher caches are ready."""
        before, self._new, found = self._new, {}, []
        for unit in state.units.values():
            if unit.phase != "waiting" or (unit.copy and state.node_at(unit.at) is None):
                continue
            request = requests[unit.run]
            if request.taught and awaited(state, request, unit) is not None:
                continue
            if unit.epoch or unit.avoid or request.taught or len(unit.tasks) > 1:
                found.append(_waiting(state, request, unit, now))
                continue
            task = state.tasks[unit.id]
            known = before.get(unit.id)
            if not known or known[0] is not request or known[1] != task.alone or known[2].since != task.since:
                known = request, task.alone, _waiting(state, request, unit, now)
            self._new[unit.id] = known
            found.append(known[2])
        return found


def _waiting(state: State, request: RunRequest, unit: UnitState, now: float) -> Waiting:
    tasks = state.members(unit)
    options = next(task.options for task in request.tasks if task.name == unit.tasks[0])
    plans = [plans_of(state, request, name) for name in unit.tasks]
    some = [next(iter(plan.values())) for plan in plans]
    timed = options.get("target_seconds")
    return Waiting(
        task=unit.id,
        needed=needed_bytes(plans),
        base=some[0].base,
        base_bytes=some[0].base_bytes,
        work=sum(plan.work * _left(task) for plan, task in zip(some, tasks, strict=True)),
        data=frozenset(name for plan in some for name in plan.data),
        avoid=_avoided(state, request, unit, now),
        devices=request.data_parallel,
        tasks=tuple(task.id for task in tasks) if len(tasks) > 1 or unit.copy else (),
        run=unit.run,
        join="never" if tasks[0].alone else request.join,
        seconds=float(timed) if some[0].steps == 0 and timed else None,
        since=min(task.since for task in tasks),
    )


def _left(task: TaskState) -> float:
    done, total = task.progress.step, task.progress.total_steps
    return 1.0 - min(done / total, 1.0) if total else 1.0


def _avoided(state: State, request: RunRequest, unit: UnitState, now: float) -> frozenset[str]:
    """Devices that a unit must not go to; those on which it failed only as long as there are others for it."""
    never = {name for name, until in unit.avoid.items() if until > now}
    if request.eval_device:
        never.add(request.eval_device)
    failed = {name for task in state.members(unit) for name in task.failed_on}
    if not failed:
        return frozenset(never)
    needed = needed_bytes([plans_of(state, request, name) for name in unit.tasks])
    others = [
        name
        for name, device in state.devices.items()
        if not device.out and name not in failed | never and _fits(device.facts.budget, needed, device.facts.plan_class)
    ]
    return frozenset(never | failed if len(others) >= request.data_parallel else never)


def _fits(budget: int | None, needed: dict[str, int], plan_class: str) -> bool:
    return plan_class in needed and (budget is None or needed[plan_class] <= budget)


def places(state: State, jobs_per_device: int, now: float) -> list[Place]:
    """All devices, with what they do."""
    active: dict[str, list[UnitState]] = {}
    for unit in state.placed():
        for name in unit.devices:
            active.setdefault(name, []).append(unit)
    found = []
    for name, device in state.devices.items():
        units, host = active.get(name, []), state.hosts[device.facts.address]
        busy = [_seconds_left(state, unit) for unit in units]
        if device.measuring > now:
            busy.append(MEASURED_SECONDS)
        found.append(
            Place(
                id=name,
                plan_class=device.facts.plan_class,
                host=device.facts.address,
                free=device.free,
                speed=device.facts.speed,
                active=jobs_per_device if device.measuring > now else len(units),
                busy_seconds=min(busy, default=0.0),
                bases=frozenset(host.bases),
                data=frozenset(host.data),
                joined_speedup=device.facts.joined_speedup,
                jobs_per_device=jobs_per_device,
                held=sum(unit.needed for unit in units),
                budget=device.facts.budget,
                name=state.called(name),
                out=device.out,
            )
        )
    return found


def _seconds_left(state: State, unit: UnitState) -> float:
    told = [task.progress.seconds_left for task in state.members(unit) if not task.outcome]
    return max((math.inf if seconds is None else seconds for seconds in told), default=0.0)


def speeds_decide(state: State, requests: Requests) -> bool:
    """Whether placement depends on measured speeds: unless all that waits finds an idle device of one kind, or has but
    one device and cannot be joined."""
    units = [
        unit
        for unit in state.units.values()
        if unit.phase == "waiting" and awaited(state, requests[unit.run], unit) is None
    ]
    usable = {name: device.facts for name, device in state.devices.items() if not device.out}
    kinds = {(facts.name, facts.driver, facts.backend) for facts in usable.values()}
    busy = {name for unit in state.placed() for name in unit.devices}
    if len(kinds) == 1 and len(units) <= len(usable.keys() - busy):
        return False
    joinable = len(units) > 1 and any(requests[unit.run].join == "auto" for unit in units)
    return bool(units) and (len(usable) > 1 or joinable)


class Refusals:
    """Why tasks of a run can never be placed: asked once for all tasks of equal needs."""

    def __init__(self, state: State, request: RunRequest):
        self._state, self._request = state, request
        self._usable = [place for place in places(state, 1, 0.0) if place.id != request.eval_device]
        self._placeable: set[tuple[tuple[str, int], ...]] = set()

    def of(self, names: Sequence[str]) -> str | None:
        """A sentence about a unit of these tasks, or None if it can be placed, now or later."""
        plans = [plans_of(self._state, self._request, name) for name in names]
        refused = [plan.refused for found in plans for plan in found.values()]
        needed = needed_bytes(plans)
        if not needed and refused and refused[0]:
            return refused[0]
        key = tuple(sorted(needed.items()))
        if key in self._placeable:
            return None
        sentence = refusal(names[0], needed, self._usable, self._request.data_parallel)
        if sentence is None:
            self._placeable.add(key)
        return sentence


def stuck(state: State, requests: Requests) -> dict[str, str]:
    """Why units wait in vain, a sentence by unit; those that wait for their turn are not among them."""
    asked: dict[str, Refusals] = {}
    found = {}
    for unit in state.units.values():
        if unit.phase != "waiting":
            continue
        if unit.copy and state.node_at(unit.at) is None:
            found[unit.id] = f"waits for the host {unit.at}, which has its newest checkpoint"
            continue
        if unit.run not in asked:
            asked[unit.run] = Refusals(state, requests[unit.run])
        if (sentence := asked[unit.run].of(unit.tasks)) is not None:
            found[unit.id] = sentence
    return found
