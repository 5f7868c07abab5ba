"""The state of a cluster as placement and people see it: what waits, the devices, and why something cannot start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from wgpu_lora.cluster.controller.run_state import CacheState, ClusterState, TaskState, UnitState
from wgpu_lora.cluster.messages import (
    DeviceView,
    Order,
    RunRequest,
    RunView,
    Snapshot,
    Task,
    TaskProgress,
    TaskView,
)
from wgpu_lora.cluster.placement.placement import refusal
from wgpu_lora.cluster.placement.placement_field import CandidateDevice, PendingTask, joined_bytes
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.memory import RunRequirements

MEASURED_SECONDS = 10.0  # that measuring a device usually takes
MAX_REFUSALS = 8
TEACHER_OPTIONS = ("teacher", "teacher_adapter", "teacher_base_dtype", "teacher_top_k")  # that a cache replaces


# -- teachers ----------------------------------------------------------------------------------------------------------


def cache_of(state: ClusterState, request: RunRequest, name: str) -> CacheState | None:
    """The caches that a task is to be trained with; None if it has no teacher, or a live one."""
    teacher = request.teachers.get(name)
    cache = state.caches.get(f"{request.name}/{teacher.cache}") if teacher else None
    return cache if cache and cache.phase != "failed" else None


def plans_of(state: ClusterState, request: RunRequest, name: str) -> dict[str, RunRequirements]:
    """The plans of a task by plan class, as it will run."""
    if name in request.teachers and cache_of(state, request, name) is None:
        return request.teachers[name].live
    return request.plans[name]


def awaited_cache(state: ClusterState, request: RunRequest, unit: UnitState) -> CacheState | None:
    """The caches that a unit cannot start without, and that are not ready."""
    caches = (cache_of(state, request, name) for name in unit.tasks) if request.teachers else ()
    return next((cache for cache in caches if cache and cache.phase != "ready"), None)


def units_of_cache(state: ClusterState, cache: CacheState) -> list[UnitState]:
    """Units that are, or will be, trained with caches, and have not ended."""
    request = state.requests[cache.run]
    return [
        unit
        for unit in state.units.values()
        if unit.run == cache.run
        and unit.phase != "done"
        and any(cache_of(state, request, name) is cache for name in unit.tasks)
    ]


# -- what waits --------------------------------------------------------------------------------------------------------


def needed_bytes(plans: Sequence[dict[str, RunRequirements]]) -> dict[str, int]:
    """Bytes of a unit of tasks, by the plan classes on which all of them can run."""
    sizes = {}
    for name in set.intersection(*(set(plan) for plan in plans)):
        class_plans = [plan[name] for plan in plans]
        if any(plan.refused for plan in class_plans):
            continue
        peak_bytes = max(plan.needed for plan in class_plans)
        base = min(plan.base_bytes for plan in class_plans)
        sizes[name] = peak_bytes if len(class_plans) == 1 else joined_bytes(base, len(class_plans), peak_bytes)
    return sizes


class Queue:
    """Units that wait. Most have never been placed, and are the same at each decision: they are described once."""

    def __init__(self) -> None:
        self._new: dict[str, tuple[RunRequest, bool, PendingTask]] = {}

    def waiting_units(self, state: ClusterState, jobs_per_device: int, now: float) -> list[PendingTask]:
        """The waiting units of runs with this many jobs per device whose checkpoint and caches can be reached."""
        before, self._new = self._new, {}
        units_waiting = []
        for unit in state.units.values():
            request = state.requests[unit.run]
            if unit.phase != "waiting" or request.jobs_per_device != jobs_per_device or unreachable(state, unit):
                continue
            if awaited_cache(state, request, unit) is not None:
                continue
            if unit.generation or unit.avoid or request.teachers or len(unit.tasks) > 1:
                units_waiting.append(_waiting_unit(state, request, unit, now))
                continue
            task = state.tasks[unit.id]
            entry = before.get(unit.id)
            if not entry or entry[0] is not request or entry[1] != task.alone or entry[2].since != task.since:
                entry = request, task.alone, _waiting_unit(state, request, unit, now)
            self._new[unit.id] = entry
            units_waiting.append(entry[2])
        return units_waiting


def unreachable(state: ClusterState, unit: UnitState) -> str:
    """The hosts that alone have a unit's newest checkpoint, if none of them is there."""
    hosts = unit.commit.hosts if unit.commit else []
    return "" if not hosts or any(map(state.node_at, hosts)) else ", ".join(hosts)


def _waiting_unit(state: ClusterState, request: RunRequest, unit: UnitState, now: float) -> PendingTask:
    tasks = state.members(unit)
    options = next(task.options for task in request.tasks if task.name == unit.tasks[0])
    plans = [plans_of(state, request, name) for name in unit.tasks]
    first_plans = [next(iter(plan.values())) for plan in plans]
    target_seconds = options.get("target_seconds")
    return PendingTask(
        task=unit.id,
        peak_bytes=needed_bytes(plans),
        base=first_plans[0].base,
        base_bytes=first_plans[0].base_bytes,
        work=sum(plan.work * _remaining_share(task) for plan, task in zip(first_plans, tasks, strict=True)),
        data=frozenset(name for plan in first_plans for name in plan.data),
        avoid=_excluded_devices(state, request, unit, now),
        devices=request.data_parallel,
        tasks=tuple(task.id for task in tasks) if len(tasks) > 1 or unit.commit else (),
        run=unit.run,
        join="never" if tasks[0].alone else request.join,
        seconds=float(target_seconds) if first_plans[0].steps == 0 and target_seconds else None,
        since=min(task.since for task in tasks),
    )


def _remaining_share(task: TaskState) -> float:
    step, total = task.progress.step, task.progress.total_steps
    return 1.0 - min(step / total, 1.0) if total else 1.0


def _excluded_devices(state: ClusterState, request: RunRequest, unit: UnitState, now: float) -> frozenset[str]:
    """Devices that a unit must not go to; those on which it failed only as long as there are others for it."""
    avoided_devices = {name for name, until in unit.avoid.items() if until > now}
    if request.eval_device:
        avoided_devices.add(request.eval_device)
    failed_devices = {name for task in state.members(unit) for name in task.failed_on}
    if not failed_devices:
        return frozenset(avoided_devices)
    sizes = needed_bytes([plans_of(state, request, name) for name in unit.tasks])
    alternatives = [
        name
        for name, device in state.devices.items()
        if not device.out
        and name not in failed_devices | avoided_devices
        and (size := sizes.get(device.facts.plan_class)) is not None
        and (device.facts.budget is None or size <= device.facts.budget)
    ]
    return frozenset(
        avoided_devices | failed_devices if len(alternatives) >= request.data_parallel else avoided_devices
    )


def candidate_devices(state: ClusterState, jobs_per_device: int, now: float) -> list[CandidateDevice]:
    """All devices, with what they do."""
    active: dict[str, list[UnitState]] = {}
    for unit in state.placed():
        for name in unit.devices:
            active.setdefault(name, []).append(unit)
    reserved = {state.requests[run.name].eval_device for run in state.runs.values() if not run.ended}
    result = []
    for name, device in state.devices.items():
        units, host = active.get(name, []), state.hosts[device.facts.address]
        busy = [_seconds_left(state, unit) for unit in units]
        if device.measuring > now:
            busy.append(MEASURED_SECONDS)
        share = sum(1 / state.requests[unit.run].jobs_per_device for unit in units)  # of its resource in Ray
        active_jobs = jobs_per_device if device.measuring > now else math.ceil(share * jobs_per_device)
        result.append(
            CandidateDevice(
                id=name,
                plan_class=device.facts.plan_class,
                host=device.facts.address,
                free=device.free,
                speed=device.facts.speed,
                active=active_jobs,
                busy_seconds=min(busy, default=0.0),
                bases=frozenset(host.bases),
                data=frozenset(host.data),
                joined_speedup=device.facts.joined_speedup,
                jobs_per_device=jobs_per_device,
                active_bytes=sum(unit.needed for unit in units),
                budget=device.facts.budget,
                name=state.device_name(name),
                out=device.out or ("reserved for evaluations" if name in reserved else ""),
            )
        )
    return result


def _seconds_left(state: ClusterState, unit: UnitState) -> float:
    estimates = [task.progress.seconds_left for task in state.members(unit) if not task.outcome]
    return max((math.inf if seconds is None else seconds for seconds in estimates), default=0.0)


def speeds_matter(state: ClusterState) -> bool:
    """Whether placement depends on measured speeds: not if every waiting unit gets an idle device of the same kind, or
    if there is one device and nothing can be joined."""
    units = [
        unit
        for unit in state.units.values()
        if unit.phase == "waiting" and awaited_cache(state, state.requests[unit.run], unit) is None
    ]
    usable = {name: device.facts for name, device in state.devices.items() if not device.out}
    kinds = {(facts.name, facts.driver, facts.backend) for facts in usable.values()}
    busy = {name for unit in state.placed() for name in unit.devices}
    if len(kinds) == 1 and len(units) <= len(usable.keys() - busy):
        return False
    joinable = len(units) > 1 and any(state.requests[unit.run].join == "auto" for unit in units)
    return bool(units) and (len(usable) > 1 or joinable)


# -- what cannot start -------------------------------------------------------------------------------------------------


class Refusals:
    """Why tasks of a run can never be placed: computed once for all tasks of equal needs."""

    def __init__(self, state: ClusterState, request: RunRequest):
        self._state, self._request = state, request
        devices = {name: device.out for name, device in state.devices.items()}
        devices_with_reasons = [
            replace(candidate, out=devices[candidate.id]) for candidate in candidate_devices(state, 1, 0.0)
        ]
        self._candidates = [candidate for candidate in devices_with_reasons if candidate.id != request.eval_device]
        self._placeable: set[tuple[tuple[str, int], ...]] = set()

    def of(self, names: Sequence[str]) -> str | None:
        """A sentence about a unit of these tasks, or None if it can be placed, now or later."""
        plans = [plans_of(self._state, self._request, name) for name in names]
        refusals = [plan.refused for by_class in plans for plan in by_class.values()]
        sizes = needed_bytes(plans)
        if not sizes and refusals and refusals[0]:
            return refusals[0]
        key = tuple(sorted(sizes.items()))
        if key in self._placeable:
            return None
        sentence = refusal(names[0], sizes, self._candidates, self._request.data_parallel)
        if sentence is None:
            self._placeable.add(key)
        return sentence


def check_placeable(state: ClusterState, request: RunRequest) -> None:
    """Raises UserError if tasks of a run can never be placed."""
    refusals = Refusals(state, request)
    sentences = [sentence for task in request.tasks if (sentence := refusals.of([task.name])) is not None]
    if len(sentences) == 1:
        raise UserError(sentences[0])
    if sentences:
        notes = [f"and {len(sentences) - MAX_REFUSALS:,} more"] if len(sentences) > MAX_REFUSALS else []
        raise UserError(
            f"{count_noun(len(sentences), 'adapter')} of run '{request.name}' cannot be placed on the cluster's "
            "devices:",
            [*sentences[:MAX_REFUSALS], *notes],
        )


def stuck_units(state: ClusterState) -> dict[str, str]:
    """Why units cannot start, a sentence per unit. Units that only wait for a free device are left out."""
    refusals: dict[str, Refusals] = {}
    reasons = {}
    for unit in state.units.values():
        if unit.phase != "waiting":
            continue
        if hosts := unreachable(state, unit):
            reasons[unit.id] = f"waits for the host {hosts}, which has its newest checkpoint"
            continue
        if unit.run not in refusals:
            refusals[unit.run] = Refusals(state, state.requests[unit.run])
        if (sentence := refusals[unit.run].of(unit.tasks)) is not None:
            reasons[unit.id] = sentence
    return reasons


# -- orders ------------------------------------------------------------------------------------------------------------


def order_of(state: ClusterState, unit: UnitState, head: str) -> Order:
    """The order of a unit that was placed just now. head: id of the controller's node."""
    request = state.requests[unit.run]
    by_name = {task.name: task for task in request.tasks}
    caches = [cache for name in unit.tasks if (cache := cache_of(state, request, name))]
    tasks = [as_trained(state, request, by_name[name]) for name in unit.tasks]
    save = min(filter(None, (task.options.get("save_steps") for task in tasks)), default=0)
    mirror = request.mirror_steps
    hosts = unit.commit.hosts if unit.commit else []
    return Order(
        run=unit.run,
        unit=unit.id,
        generation=unit.generation,
        tasks=tasks,
        key=state.devices[unit.devices[0]].facts.key,
        save_steps=min(save, mirror) if save and mirror else save or mirror,
        mirror_steps=mirror,
        resume=unit.commit,
        hosts=[node for host in hosts if (node := state.node_at(host))],
        mirrors=_mirrors(state, unit.devices[0], head) if request.storage is None else [],
        storage=request.storage,
        heldout_elsewhere=request.eval_device is not None,
        parcels=[*request.parcels, *(parcel for cache in caches for parcel in cache.parcels.values())],
    )


def as_trained(state: ClusterState, request: RunRequest, task: Task) -> Task:
    """A task with its caches, which are ready, instead of its teacher."""
    cache = cache_of(state, request, task.name)
    if cache is None or not cache.parcels:
        return task
    options = {name: value for name, value in task.options.items() if name not in TEACHER_OPTIONS}
    return replace(task, options={**options, **{name: parcel.value for name, parcel in cache.parcels.items()}})


def _mirrors(state: ClusterState, device: str, head: str) -> list[str]:
    """The node whose host keeps checkpoints of a device's host: the head, or for its own devices another.

    That is the one with the most devices, which is probably there for the cluster.
    """
    if state.devices[device].node != head:
        return [head]
    candidates = [node for node in state.nodes if node.id != head]
    return [max(candidates, key=lambda node: (len(node.devices), node.address)).id] if candidates else []


# -- views -------------------------------------------------------------------------------------------------------------


def snapshot(state: ClusterState, run: str | None, now: float) -> Snapshot:
    """Tasks of one run, or of all; devices, nodes and events are always all."""
    stuck = stuck_units(state)
    requests = [request for name, request in state.requests.items() if run in (None, name)]
    return Snapshot(
        time=now,
        runs=[
            RunView(request.name, request.by, state_of_run.began, state_of_run.ended > 0, request.shared, request.sweep)
            for request in requests
            if (state_of_run := state.runs[request.name])
        ],
        tasks=[
            _task_view(state, request, state.tasks[f"{request.name}/{task.name}"], task, stuck)
            for request in requests
            for task in request.tasks
        ],
        devices=[_device_view(state, name) for name in state.devices],
        nodes=list(state.nodes),
        events=list(state.events),
    )


def _task_view(
    state: ClusterState, request: RunRequest, task: TaskState, definition: Task, stuck: dict[str, str]
) -> TaskView:
    unit = state.units.get(task.unit)
    cache = awaited_cache(state, request, unit) if unit and unit.phase == "waiting" else None
    return TaskView(
        run=task.run,
        name=task.name,
        state=task.state,
        device=task.device,
        progress=_cache_progress(cache) if cache else _progress(task),
        output=definition.output,
        attempts=task.attempts,
        reason=stuck.get(task.unit) or (cache.reason if cache else "") or task.reason,
        fetched=task.fetched or (task.over and not task.results),
        params=definition.params,
    )


def _cache_progress(cache: CacheState) -> TaskProgress:
    if cache.reason:
        return TaskProgress(doing="teacher cache: will be tried again")
    status = (
        f"{cache.rows / cache.total:.0%}" if cache.total else "to begin" if cache.phase == "waiting" else "starting"
    )
    return TaskProgress(doing=f"teacher cache: {status}")


def _progress(task: TaskState) -> TaskProgress:
    """A task's progress; of one that ended before the rest of its pipeline, that the pipeline goes on."""
    if not task.outcome or task.over:
        return task.progress
    doing = f"{task.outcome}; its pipeline goes on"
    return replace(task.progress, tokens_per_second=None, seconds_left=None, doing=doing)


def _device_view(state: ClusterState, name: str) -> DeviceView:
    device = state.devices[name]
    units = [unit for unit in state.placed() if name in unit.devices]
    rates = [
        rate for unit in units for task in state.members(unit) if (rate := task.progress.tokens_per_second) is not None
    ]
    return DeviceView(
        facts=device.facts,
        state=device.out or ("busy" if units else "idle"),
        units=[unit.id for unit in units],
        tokens_per_second=sum(rates) if rates else None,
        failures=device.failures,
    )
