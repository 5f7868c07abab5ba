"""The state of a cluster as JSON values, and its transitions: no clock, no Ray, no files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import normpath
from pathlib import PurePath

from wgpu_lora.cluster.messages import (
    Commit,
    DeviceFacts,
    EventLine,
    NodeFacts,
    Parcel,
    Report,
    RunRequest,
    TaskProgress,
)
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun, join_words

MAX_EVENTS = 200
ENDED = ("finished", "stopped", "failed", "cancelled")
OUTCOMES = {"finished": "finished", "stopped": "stopped", "stopped early": "stopped", "failed": "failed"}
QUARANTINE = 2  # failures of a device in a row
FAILURES = 3  # of a task in a row, without a newer checkpoint
DEATHS = 10  # likewise, of its actor: a machine that has too little memory kills for ever
NO_ROOM_SECONDS = 30.0  # before a device is tried again
MEASURE_SECONDS = 120.0  # after which a device is used without its speed
REMEASURE_SECONDS = 1800.0  # after which one that was measured beside other programs is measured again
RETAIN_SECONDS = 7 * 86400.0  # how long results wait for somebody to fetch them
MAX_REMEMBERED = 64  # bases and data of a host
MAX_NAMES = 5  # in a sentence
RESERVED = ("sent", "check")  # folders of stores that are of no run


@dataclass
class TaskState:
    """A task of a run.

    Attributes:
        state: pending, starting, running, moving, or one of ENDED, which it becomes when its results can be fetched.
        outcome: of a pipeline's task that has ended before the others, as its report names it.
        ending: why it is to end: `stopped` or `cancelled`; empty if it is not.
        attempts: how often its unit was placed. since: when it began to wait.
        failed_on: ids of devices on which it failed since its newest checkpoint. deaths: of its actor, likewise.
        alone: it is joined with no others any more.
        committed: its progress when its newest checkpoint was stored.
        results: it has a result, or a checkpoint, in its unit's commit. fetched: it is where it belongs.
    """

    run: str
    name: str
    unit: str
    state: str = "pending"
    progress: TaskProgress = field(default_factory=TaskProgress)
    committed: TaskProgress = field(default_factory=TaskProgress)
    outcome: str = ""
    ending: str = ""
    attempts: int = 0
    since: float = 0.0
    failed_on: list[str] = field(default_factory=list)
    deaths: int = 0
    alone: bool = False
    device: str | None = None
    reason: str = ""
    results: bool = False
    fetched: bool = False

    @property
    def id(self) -> str:
        return f"{self.run}/{self.name}"

    @property
    def over(self) -> bool:
        return self.state in ENDED


@dataclass
class UnitState:
    """The tasks that one actor trains. Every task that is not over is in exactly one.

    Attributes:
        tasks: names, the first of which names the unit.
        phase: `waiting` for a device, `placed`, or `done`.
        generation: how often it was placed. Only the actor of the newest may commit.
        devices: ids while it is placed, the leader first. needed: bytes on each. started: its actor has answered.
        placed_at: when. commit: its newest. avoid: devices without room for it -> until when they are not tried again.
    """

    id: str
    run: str
    tasks: list[str]
    phase: str = "waiting"
    generation: int = 0
    devices: list[str] = field(default_factory=list)
    needed: int = 0
    started: bool = False
    placed_at: float = 0.0
    commit: Commit | None = None
    avoid: dict[str, float] = field(default_factory=dict)


@dataclass
class DeviceState:
    """A device.

    Attributes:
        facts: of its last survey. node: Ray's id of its node then.
        free: bytes that a new job could get: those of the survey less what was placed since.
        gone: it was not in the last survey. measuring: until when its speed is measured, at most. again: when it may be
            measured again.
        failures: units in a row that failed on it without a new checkpoint.
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
    """A run. began, ended: seconds since 1970; ended is 0 while it goes on."""

    name: str
    began: float
    ended: float = 0.0


@dataclass
class CacheState:
    """The teacher caches of some tasks of a run, which its evaluation device makes.

    Attributes:
        phase: `waiting`, `making`, `ready`, or `failed` for good, after which its tasks have live teachers.
        parcels: once complete, by the names of the options. rows, total: progress. failures: in a row without more
            rows. not_before: when it may be tried again. reason: why it is not made.
    """

    run: str
    name: str
    phase: str = "waiting"
    parcels: dict[str, Parcel] = field(default_factory=dict)
    rows: int = 0
    total: int = 0
    failures: int = 0
    not_before: float = 0.0
    reason: str = ""

    @property
    def id(self) -> str:
        return f"{self.run}/{self.name}"


@dataclass
class HostState:
    """Base models and data that are probably in a host's caches. node: Ray's id."""

    node: str = ""
    bases: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)


@dataclass
class ClusterState:
    """All of it.

    Attributes:
        requests: by run; they do not change. tasks: by id, `<run>/<name>`. units: by id.
        generations: the newest of each id that ever was a unit's. hosts: by address, also those that have gone.
    """

    requests: dict[str, RunRequest] = field(default_factory=dict)
    runs: dict[str, RunState] = field(default_factory=dict)
    tasks: dict[str, TaskState] = field(default_factory=dict)
    units: dict[str, UnitState] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    devices: dict[str, DeviceState] = field(default_factory=dict)
    nodes: list[NodeFacts] = field(default_factory=list)
    hosts: dict[str, HostState] = field(default_factory=dict)
    caches: dict[str, CacheState] = field(default_factory=dict)
    events: list[EventLine] = field(default_factory=list)

    def members(self, unit: UnitState) -> list[TaskState]:
        return [self.tasks[f"{unit.run}/{name}"] for name in unit.tasks]

    def placed(self) -> Iterator[UnitState]:
        return (unit for unit in self.units.values() if unit.phase == "placed")

    def tasks_of(self, run: str) -> list[TaskState]:
        return [task for task in self.tasks.values() if task.run == run]

    def log(self, now: float, text: str) -> None:
        """Add a line to the events, of which only the newest are kept."""
        self.events.append(EventLine(now, text))
        del self.events[:-MAX_EVENTS]

    def node_at(self, address: str) -> str | None:
        """The id of the living node at an address."""
        return next((node.id for node in self.nodes if node.address == address), None)

    def device_name(self, device: str) -> str:
        """A device's name and host, for people."""
        state = self.devices.get(device)
        if state is None:
            return device
        host = next((node.host for node in self.nodes if node.address == state.facts.address), state.facts.address)
        return f"{state.facts.name} on {host}"


# -- runs --------------------------------------------------------------------------------------------------------------


def add_run(state: ClusterState, request: RunRequest, now: float) -> None:
    """Take a run that has been checked."""
    state.requests[request.name] = request
    state.runs[request.name] = RunState(request.name, now)
    for task in request.tasks:
        state.tasks[f"{request.name}/{task.name}"] = TaskState(request.name, task.name, "", since=now)
        new_unit(state, request.name, [task.name])
    for teacher in request.teachers.values():
        cache = CacheState(request.name, teacher.cache)
        state.caches.setdefault(cache.id, cache)
    by = f", by {request.by}" if request.by else ""
    state.log(now, f"{request.name}: {count_noun(len(request.tasks), 'adapter')} to train{by}")


def check_run(state: ClusterState, request: RunRequest) -> None:
    """Refuse a run whose name, tasks or outputs cannot be taken. Raises UserError."""
    if request.name in RESERVED:
        raise UserError(f"A run cannot have the name '{request.name}': choose another --name.")
    if request.name in state.runs:
        raise UserError(f"A run '{request.name}' is known already: choose another --name, or attach to that one.")
    if not request.tasks:
        raise UserError(f"Run '{request.name}' has no adapters: give some with --adapters.")
    names = [task.name for task in request.tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"Run '{request.name}' has two adapters '{twice}': give them different names.")
    unplanned = next((name for name in names if not request.plans.get(name)), None)
    if unplanned is not None:
        raise UserError(f"Adapter '{unplanned}' has no memory plan: plan it for the cluster's devices first.")
    for other in state.requests.values():
        if not state.runs[other.name].ended and _same_folder(other, request):
            _check_outputs(request, other)


def _same_folder(request: RunRequest, other: RunRequest) -> bool:
    """Whether results go to one folder: a shared one, whoever submitted it, or that of one person."""
    return request.shared == other.shared and (request.shared is not None or request.by == other.by)


def _check_outputs(request: RunRequest, other: RunRequest) -> None:
    """Raises UserError if an output of the request is one of another run's, lies in one, or has one in it."""
    paths = [PurePath(normpath(task.output)) for task in other.tasks]
    for task in request.tasks:
        output = PurePath(normpath(task.output))
        for path in paths:
            if output == path or path in output.parents or output in path.parents:
                where = "is" if output == path else "overlaps"
                raise UserError(
                    f"{task.output}, the output of adapter '{task.name}', {where} that of an adapter of run "
                    f"'{other.name}', which is not over: choose another output."
                )


def check_exists(state: ClusterState, run: str) -> None:
    """Raises UserError if there is no such run."""
    if run not in state.runs:
        raise UserError(f"No run '{run}' is known: 'wgpu-lora cluster status' lists all runs.")


def cancel_run(state: ClusterState, run: str, name: str | None, now: float) -> None:
    """End a task, or all of a run: at once where no actor trains it, else with a last checkpoint.

    A run that only waits for its results to be fetched is over then.

    Raises:
        UserError: there is no such run or task.
    """
    check_exists(state, run)
    if name is not None and f"{run}/{name}" not in state.tasks:
        names = [task.name for task in state.tasks_of(run)]
        listing = join_words(names[:MAX_NAMES], max(0, len(names) - MAX_NAMES))
        raise UserError(f"Run '{run}' has no adapter '{name}': its adapters are {listing}.")
    tasks = [task for task in state.tasks_of(run) if not task.over and name in (None, task.name)]
    for task in tasks:
        task.ending = "cancelled"
    for unit in {task.unit: state.units[task.unit] for task in tasks}.values():
        members = state.members(unit)
        if unit.phase == "waiting" and all(task.ending == "cancelled" for task in members):
            _end_cancelled(unit, members)
    if tasks:
        state.log(now, f"{run}: {name or 'all'} cancelled")
    elif name is None and not state.runs[run].ended:
        state.runs[run].ended = now
    settle_run(state, run, now)


def settle_run(state: ClusterState, run: str, now: float) -> None:
    """Note when a run is over; called after whatever may have ended it."""
    record, tasks = state.runs[run], state.tasks_of(run)
    if record.ended or not all(task.over for task in tasks):
        return
    if state.requests[run].shared is None or all(task.fetched or not task.results for task in tasks):
        record.ended = now
        state.log(now, f"{run}: all adapters have ended")


def forgettable_runs(state: ClusterState, now: float) -> list[str]:
    """Runs that are over, the results of which have been fetched, or by nobody for a week."""
    return [
        run.name
        for run in state.runs.values()
        if run.ended
        and (
            now - run.ended > RETAIN_SECONDS
            or all(task.fetched or not task.results for task in state.tasks_of(run.name))
        )
    ]


def forget_run(state: ClusterState, run: str) -> None:
    """Forget a run, but not its generations: a run of the same name must not repeat them."""
    del state.runs[run], state.requests[run]
    state.tasks = {key: task for key, task in state.tasks.items() if task.run != run}
    state.units = {key: unit for key, unit in state.units.items() if unit.run != run}
    state.caches = {key: cache for key, cache in state.caches.items() if cache.run != run}


# -- units -------------------------------------------------------------------------------------------------------------


def unit_name(unit: UnitState) -> str:
    """A unit's tasks, for people."""
    names = join_words(unit.tasks[:3], max(0, len(unit.tasks) - 3))
    return f"{unit.run}: {names if len(unit.tasks) == 1 else f'the pipeline of {names}'}"


def new_unit(state: ClusterState, run: str, names: Sequence[str]) -> UnitState:
    """A unit of these tasks. It continues the generations of its id."""
    unit = UnitState(f"{run}/{names[0]}", run, list(names))
    unit.generation = state.generations.get(unit.id, 0)
    state.units[unit.id] = unit
    for task in state.members(unit):
        task.unit = unit.id
    return unit


def join_units(state: ClusterState, ids: Sequence[str]) -> UnitState:
    """The unit of tasks that were placed together, which is new if placement joined them."""
    tasks = [state.tasks[name] for name in ids]
    unit = state.units[tasks[0].unit]
    if set(unit.tasks) == {task.name for task in tasks}:
        return unit
    for task in tasks:
        del state.units[task.unit]
    return new_unit(state, tasks[0].run, [task.name for task in tasks])


def split_unit(state: ClusterState, unit: UnitState) -> None:
    """Make each task of a unit one of its own, which begins anew."""
    del state.units[unit.id]
    for task in state.members(unit):
        task.progress = task.committed = TaskProgress()
        alone = new_unit(state, unit.run, [task.name])
        if task.ending == "cancelled":
            _end_cancelled(alone, [task])


def start_unit(state: ClusterState, unit: UnitState, devices: Sequence[str], peak_bytes: int, now: float) -> None:
    """Give a unit its next generation, on these devices."""
    unit.generation = state.generations[unit.id] = state.generations.get(unit.id, 0) + 1
    unit.phase, unit.started, unit.placed_at = "placed", False, now
    unit.devices, unit.needed = list(devices), peak_bytes
    for device in map(state.devices.__getitem__, devices):
        if device.free is not None:
            device.free = max(device.free - peak_bytes, 0)
    for task in state.members(unit):
        task.attempts += 1
        task.state, task.device, task.reason = "starting", devices[0], ""
    suffix = " again" if unit.generation > 1 else ""
    state.log(now, f"{unit_name(unit)} starts{suffix} on {state.device_name(devices[0])}")


def accept_commit(state: ClusterState, commit: Commit) -> bool:
    """Take a checkpoint that has been stored; False if its actor is not the unit's any more."""
    unit = state.units.get(commit.unit)
    if unit is None or unit.phase != "placed" or commit.generation != unit.generation:
        return False
    newer = unit.commit is None or any(
        commit.steps.get(name, 0) > unit.commit.steps.get(name, 0) for name in unit.tasks
    )
    unit.commit = commit
    for task in state.members(unit):
        task.committed = task.progress
        if newer:
            task.failed_on, task.deaths = [], 0
    if newer:
        for name in unit.devices:
            state.devices[name].failures = 0
    return True


def _release(state: ClusterState, unit: UnitState) -> None:
    """Free the devices of a unit whose actor has ended."""
    for device in (state.devices[name] for name in unit.devices if name in state.devices):
        if device.free is not None:
            budget = device.facts.budget
            device.free = device.free + unit.needed if budget is None else min(device.free + unit.needed, budget)
    unit.devices, unit.needed, unit.started = [], 0, False


def wait_again(state: ClusterState, unit: UnitState, now: float, reason: str) -> None:
    """Let a unit wait for a device, to resume from its newest checkpoint."""
    _release(state, unit)
    unit.phase = "waiting"
    tasks = state.members(unit)
    if all(task.ending == "cancelled" for task in tasks):
        _end_cancelled(unit, tasks)
        return
    for task in tasks:
        step = unit.commit.steps.get(task.name, 0) if unit.commit else 0
        task.progress = replace(task.committed, step=step, tokens_per_second=None, seconds_left=None, doing="")
        task.state, task.since, task.outcome, task.reason, task.device = "moving", now, "", reason, None
    if not unit.commit and len(tasks) > 1:
        split_unit(state, unit)


def _has_results(unit: UnitState, task: TaskState) -> bool:
    """Whether the newest commit of a unit has something of a task: at least a checkpoint, to go on from."""
    return unit.commit is not None and (unit.commit.final or task.name in unit.commit.steps)


def _end_cancelled(unit: UnitState, tasks: Iterable[TaskState]) -> None:
    """End a unit that nobody trains."""
    unit.phase = "done"
    for task in tasks:
        task.state, task.results, task.reason = "cancelled", _has_results(unit, task), ""


def give_up(state: ClusterState, unit: UnitState, reason: str) -> None:
    """End the tasks of a unit as failed, with their newest checkpoints as results."""
    _release(state, unit)
    if all(task.ending == "cancelled" for task in state.members(unit)):
        _end_cancelled(unit, state.members(unit))
        return
    unit.phase = "done"
    for task in state.members(unit):
        task.state, task.reason, task.results = "failed", reason, _has_results(unit, task)


# -- reports of training actors ----------------------------------------------------------------------------------------


def take_report(state: ClusterState, unit: UnitState, report: Report, now: float) -> None:
    """Take the progress of a unit's tasks, and the end of its actor."""
    unit.started = True
    for task in state.members(unit):
        if (progress := report.progress.get(task.name)) is not None:
            task.progress = merged_progress(task.progress, progress)
            if progress.step and task.state != "running":
                task.state = "running"
                plan = next(iter(state.requests[unit.run].plans[task.name].values()))
                _remember(state, unit.devices[0], plan.base, plan.data)
        task.outcome = report.outcomes.get(task.name) or task.outcome
        task.reason = report.reason
    if report.ended is not None:
        _take_end(state, unit, report.ended, report.outcomes, report.reason, now)
        settle_run(state, unit.run, now)


def merged_progress(before: TaskProgress, new: TaskProgress) -> TaskProgress:
    """Newer values; held-out losses stay until there are newer ones, which a resumed process measures later."""
    losses = [loss for loss in (before.best_eval_loss, new.best_eval_loss) if loss is not None]
    return replace(
        new,
        loss=new.loss if new.loss is not None else before.loss,
        eval_loss=new.eval_loss if new.eval_loss is not None else before.eval_loss,
        best_eval_loss=min(losses, default=None),
    )


def lose_unit(state: ClusterState, unit: UnitState, reason: str, now: float) -> None:
    """The actor of a unit has died, or its node."""
    final = unit.commit is not None and unit.commit.final and unit.commit.generation == unit.generation
    if final and unit.commit and unit.commit.outcomes:  # it died before its last report
        _release(state, unit)
        _finish(state, unit, unit.commit.outcomes, "")
    elif unit.started:
        for task in state.members(unit):
            task.deaths += 1
        _try_again(state, unit, reason, now)
    else:  # others may hold its device, of whom only Ray knows
        unit.avoid[unit.devices[0]] = now + NO_ROOM_SECONDS
        wait_again(state, unit, now, reason)
    settle_run(state, unit.run, now)


def _take_end(
    state: ClusterState, unit: UnitState, end: str, outcomes: Mapping[str, str], reason: str, now: float
) -> None:
    device, tasks = unit.devices[0], state.members(unit)
    complete = unit.commit is not None and unit.commit.final and unit.commit.generation == unit.generation
    if complete and (end == "done" or (end == "stopped" and all(task.ending == "cancelled" for task in tasks))):
        for name in unit.devices:
            state.devices[name].failures = 0
        _release(state, unit)
        _finish(state, unit, outcomes, reason)
    elif end == "refused":
        _take_refusal(state, unit, reason or "its training was refused", now)
    elif end == "no room":
        unit.avoid[device] = now + NO_ROOM_SECONDS
        state.log(now, f"{unit_name(unit)} found no room on {state.device_name(device)}")
        for task in tasks:
            task.alone = task.alone or len(tasks) > 1
        wait_again(state, unit, now, reason or "there was no room")
    elif end == "no checkpoint":
        state.log(now, f"{unit_name(unit)} cannot go on from its newest checkpoint: {reason}")
        unit.commit = None
        for task in tasks:
            task.committed = TaskProgress()
            task.deaths += 1
        _try_again(state, unit, reason, now)
    elif end == "stopped":
        for task in tasks:
            task.deaths += 1
        _try_again(state, unit, reason or "its actor was stopped", now)
    else:
        before = {name for task in tasks for name in task.failed_on}
        for task in tasks:
            task.failed_on.append(device)
        _try_again(state, unit, reason or "its actor ended without its results", now)
        if before <= {device}:
            _count_failure(state, device, now)
        elif len(before) == 1:  # it fails on unlike devices, so that was not the first one's fault either
            _clear_failures(state, before.pop(), now)


def _finish(state: ClusterState, unit: UnitState, outcomes: Mapping[str, str], reason: str) -> None:
    """End the tasks of a unit, of which the final commit is known."""
    unit.phase = "done"
    for task in state.members(unit):
        outcome = outcomes.get(task.name) or task.outcome
        state_name = OUTCOMES.get(outcome, "failed")
        if task.ending == "cancelled" and state_name != "finished":
            state_name = "cancelled"
        task.state, task.results, task.outcome = state_name, True, outcome
        quiet = state_name in ("finished", "cancelled")
        task.reason = "" if quiet else reason or f"its run ended as {outcome or 'unknown'}"


def _take_refusal(state: ClusterState, unit: UnitState, reason: str, now: float) -> None:
    """One of its tasks is wrong; alone, each of several shows whether it is the one."""
    tasks = state.members(unit)
    if len(tasks) > 1 and not unit.commit:
        for task in tasks:
            task.alone = True
        wait_again(state, unit, now, reason)
    else:
        give_up(state, unit, reason)


def _try_again(state: ClusterState, unit: UnitState, reason: str, now: float) -> None:
    """An actor ended too early: resume elsewhere, unless that has been in vain too often."""
    tasks = state.members(unit)
    state.log(now, f"{unit_name(unit)} was interrupted on {state.device_name(tasks[0].device or '')}: {reason}")
    if all(len(task.failed_on) < FAILURES and task.deaths < DEATHS for task in tasks):
        wait_again(state, unit, now, reason)
    elif len(tasks) > 1 and not unit.commit:  # which one is the reason shows when each is alone
        for task in tasks:
            task.alone, task.failed_on, task.deaths = True, [], 0
        wait_again(state, unit, now, reason)
    else:
        times = count_noun(max(len(tasks[0].failed_on), tasks[0].deaths), "time")
        give_up(state, unit, f"interrupted {times} in a row without a new checkpoint, at last since {reason}")


# -- devices -----------------------------------------------------------------------------------------------------------


def take_survey(state: ClusterState, nodes: Sequence[NodeFacts], now: float) -> None:
    """Take the devices of the living nodes; those of all others are gone."""
    state.nodes = list(nodes)
    for node in nodes:
        state.hosts.setdefault(node.address, HostState()).node = node.id
    devices = {device.id: (node, device) for node in nodes for device in node.devices}
    for name, (node, facts) in devices.items():
        device = state.devices.get(name)
        if device is None or device.gone:
            state.log(now, f"{facts.name} on {node.host} is there")
        if device is None:
            device = state.devices[name] = DeviceState(facts, node.id)
        if facts.speed is None:
            facts = replace(facts, speed=device.speed, joined_speedup=device.joined_speedup)
        else:
            device.speed = device.joined_speedup = None
        device.facts, device.node, device.gone = facts, node.id, False
        # What has not loaded yet has no lease yet: the survey counts its bytes as free.
        starting = sum(
            unit.needed
            for unit in state.placed()
            if name in unit.devices and all(task.state != "running" for task in state.members(unit))
        )
        device.free = None if facts.free is None else max(facts.free - starting, 0)
    for name, device in state.devices.items():
        if name not in devices and not device.gone:
            device.gone = True
            state.log(now, f"{state.device_name(name)} is gone")
    if all(run.ended for run in state.runs.values()):  # until then, tables and sentences name those that are gone
        absent = [name for name, device in state.devices.items() if device.gone and not device.quarantined]
        for name in absent:
            del state.devices[name]


def devices_to_measure(state: ClusterState, now: float) -> list[tuple[str, str, str]]:
    """Idle devices of unknown speed: their ids, nodes and keys. Nothing is placed on them meanwhile."""
    busy = {name for unit in state.placed() for name in unit.devices}
    devices = []
    for name, device in state.devices.items():
        if device.speed == device.facts.speed and not device.out and name not in busy and now >= device.again:
            device.again, device.measuring = now + REMEASURE_SECONDS, now + MEASURE_SECONDS
            devices.append((name, device.node, device.facts.key))
    return devices


def take_speed(state: ClusterState, device: str, speed: float | None, joined_speedup: float | None) -> None:
    """A device has been measured, or cannot be."""
    if record := state.devices.get(device):
        record.measuring = 0.0
        if speed is not None:
            record.speed, record.joined_speedup = speed, joined_speedup
            record.facts = replace(record.facts, speed=speed, joined_speedup=joined_speedup)


def _count_failure(state: ClusterState, name: str, now: float) -> None:
    device = state.devices[name]
    device.failures += 1
    if device.failures >= QUARANTINE and not device.quarantined:
        device.quarantined = True
        why = f"{state.device_name(name)} is quarantined, since {device.failures} jobs in a row failed on it"
        state.log(now, f"{why}: 'wgpu-lora cluster release {name}' uses it again")


def _clear_failures(state: ClusterState, name: str, now: float) -> None:
    """Forget the failures of a device, since the task that failed on it has failed on another one, too."""
    if (device := state.devices.get(name)) is None:
        return
    device.failures = 0
    if device.quarantined:
        device.quarantined = False
        state.log(now, f"{state.device_name(name)} is used again, since what failed on it fails on others, too")


def release_device(state: ClusterState, name: str, now: float) -> None:
    """Use a quarantined device again. Raises UserError if it is not quarantined."""
    device = state.devices.get(name)
    if device is None or not device.quarantined:
        raise UserError(f"No device {name} is quarantined: 'wgpu-lora cluster status' lists all devices.")
    device.quarantined, device.failures = False, 0
    state.log(now, f"{state.device_name(name)} is used again")


def _remember(state: ClusterState, device: str, base: str, data: Sequence[str]) -> None:
    """A device's host will soon have a base model and data in its caches."""
    host = state.hosts[state.devices[device].facts.address]
    host.bases = [*(name for name in host.bases if name != base), base][-MAX_REMEMBERED:]
    host.data = [*(name for name in host.data if name not in data), *data][-MAX_REMEMBERED:]
