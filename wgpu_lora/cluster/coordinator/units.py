"""How units come to be placed, and what becomes of their tasks when their processes end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from wgpu_lora.cluster.coordinator.state import State, TaskState, UnitState
from wgpu_lora.cluster.facts import Copy, Progress
from wgpu_lora.text import join_words

ENDINGS = {"finished": "finished", "stopped": "stopped", "stopped early": "stopped", "failed": "failed"}


def new_unit(state: State, run: str, names: Sequence[str]) -> UnitState:
    """A unit of these tasks. It continues the epochs of its id."""
    unit = UnitState(f"{run}/{names[0]}", run, list(names))
    unit.epoch = state.epochs.get(unit.id, 0)
    state.units[unit.id] = unit
    for task in state.members(unit):
        task.unit = unit.id
    return unit


def join(state: State, tasks: Sequence[TaskState]) -> UnitState:
    """Put tasks that are units of their own into one."""
    for task in tasks:
        del state.units[task.unit]
    return new_unit(state, tasks[0].run, [task.name for task in tasks])


def split(state: State, unit: UnitState) -> None:
    """Make each task of a unit one of its own, which begins anew."""
    del state.units[unit.id]
    for task in state.members(unit):
        task.progress, task.kept = Progress(), Progress()
        alone = new_unit(state, unit.run, [task.name])
        if task.ending == "cancelled":
            cancelled(alone, [task])


def start(state: State, unit: UnitState, devices: Sequence[str], needed: int, expires: float) -> None:
    """Give a unit its next epoch, on these devices."""
    unit.epoch = state.epochs[unit.id] = state.epochs.get(unit.id, 0) + 1
    unit.phase, unit.answered, unit.expires = "placed", False, expires
    unit.devices, unit.needed = list(devices), needed
    for device in map(state.devices.__getitem__, devices):
        if device.free is not None:
            device.free = max(device.free - needed, 0)
    for task in state.members(unit):
        task.attempts += 1
        task.state, task.device, task.said = "starting", devices[0], ""


def take_copy(state: State, unit: UnitState, copy: Copy) -> bool:
    """Remember a copy, unless a newer one is known. Returns whether it was taken.

    One of earlier steps is not, unless it has the results of the present epoch: a run whose weights are ruined ends
    with an older checkpoint. Nor is one of an older epoch in which the unit had other tasks. A task without a step has
    no checkpoint yet.
    """
    known, named = unit.copy, set(copy.steps)
    if copy.unit != unit.id or not named <= set(unit.tasks):
        return False
    if copy.epoch != unit.epoch and named != set(unit.tasks):
        return False
    before = {name: known.steps.get(name, 0) if known else 0 for name in unit.tasks}
    now = {name: copy.steps.get(name, 0) for name in unit.tasks}
    results = copy.final and copy.epoch == unit.epoch
    if not results and any(now[name] < before[name] for name in unit.tasks):
        return False
    if known and ((known.epoch, known.final) > (copy.epoch, copy.final) or known == copy):
        return False
    at = state.address(copy.host)
    if not at:  # a node that has not been surveyed yet: nobody could find the copy there
        return False
    unit.copy, unit.at = copy, at
    for task in state.members(unit):
        task.kept = task.progress
        if now != before:
            task.failed_on, task.killed = [], 0
    if now != before:
        for name in unit.devices:
            state.devices[name].failures = 0
    return True


def release(state: State, unit: UnitState) -> None:
    """Free the devices of a unit whose process has ended."""
    for device in (state.devices[name] for name in unit.devices if name in state.devices):
        if device.free is not None:
            most = device.facts.budget
            device.free = device.free + unit.needed if most is None else min(device.free + unit.needed, most)
    unit.devices, unit.needed, unit.expires = [], 0, 0.0


def lose(state: State, unit: UnitState, now: float, why: str) -> None:
    """No process of the unit's epoch runs any more, or ever will: its lease is over."""
    state.say(now, f"{called(unit)} is lost: {why}")
    release(state, unit)
    if unit.answered:
        unit.phase = "lost"
        for task in state.members(unit):
            task.state = "moving"
    else:  # its device has never been allowed to start a process
        wait(state, unit, now, why)


def wait(state: State, unit: UnitState, now: float, why: str) -> None:
    """Let a unit wait for a device, to resume from its newest copy. Its devices are free already."""
    unit.phase, unit.answered = "waiting", False
    tasks = state.members(unit)
    if all(task.ending == "cancelled" for task in tasks):
        cancelled(unit, tasks)
        return
    for task in tasks:
        step = unit.copy.steps.get(task.name, 0) if unit.copy else 0
        task.progress = replace(task.kept, step=step, tokens_per_second=None, seconds_left=None, doing="")
        task.state, task.since, task.outcome, task.said, task.device = "moving", now, "", why, None
    if not unit.copy and len(tasks) > 1:
        split(state, unit)


def cancelled(unit: UnitState, tasks: Iterable[TaskState]) -> None:
    """End a unit that has no process, and of which nothing is wanted any more."""
    unit.phase = "done"
    for task in tasks:
        task.state, task.results, task.said = "cancelled", _has_results(unit, task), ""


def finish(state: State, unit: UnitState, outcomes: Mapping[str, str], said: str) -> None:
    """End the tasks of a unit, of which the final copy is known, with the outcomes that its worker told."""
    unit.phase = "done"
    for task in state.members(unit):
        outcome = outcomes.get(task.name) or task.outcome
        ended = ENDINGS.get(outcome, "failed")
        if task.ending == "cancelled" and ended != "finished":
            ended = "cancelled"
        task.state, task.results, task.outcome = ended, True, outcome
        task.said = "" if ended in ("finished", "cancelled") else said or f"its run ended as {outcome or 'unknown'}"


def give_up(state: State, unit: UnitState, said: str) -> None:
    """End the tasks of a unit as failed, with their newest checkpoints as results."""
    unit.phase = "done"
    for task in state.members(unit):
        task.state, task.said, task.results = "failed", said, _has_results(unit, task)


def _has_results(unit: UnitState, task: TaskState) -> bool:
    """Whether the newest copy of a unit has something of a task: at least a checkpoint, to go on from."""
    return unit.copy is not None and (unit.copy.final or task.name in unit.copy.steps)


def called(unit: UnitState) -> str:
    """A unit's tasks, for people."""
    names = join_words(unit.tasks[:3], max(0, len(unit.tasks) - 3))
    return f"{unit.run}: {names if len(unit.tasks) == 1 else f'the pipeline of {names}'}"
