"""What follows from the end of a unit's process."""

from __future__ import annotations

from wgpu_lora.cluster.coordinator import fleet, units
from wgpu_lora.cluster.coordinator.state import State, UnitState
from wgpu_lora.cluster.facts import Report
from wgpu_lora.text import count_noun

FAILURES = 3  # of a task in a row, without a newer copy
KILLS = 10  # likewise, from outside: a machine that has too little memory kills for ever
NO_ROOM_SECONDS = 30.0  # before a device is tried again


def ended(state: State, unit: UnitState, report: Report, now: float) -> None:
    """The process of a unit has ended, as its report says."""
    devices, kind = list(unit.devices), report.ended
    complete = unit.copy is not None and unit.copy.final and unit.copy.epoch == unit.epoch
    tasks = state.members(unit)
    units.release(state, unit)
    if complete and (kind == "done" or (kind == "stopped" and all(task.ending == "cancelled" for task in tasks))):
        for name in devices:
            state.devices[name].failures = 0
        units.finish(state, unit, report.outcomes, report.said)
    elif kind == "refused":
        _refused(state, unit, report.said or "its worker refused it", now)
    elif kind == "no room":
        unit.avoid[devices[0]] = now + NO_ROOM_SECONDS
        state.say(now, f"{units.called(unit)} found no room on {state.called(devices[0])}")
        for task in tasks:
            task.alone = task.alone or len(tasks) > 1
        units.wait(state, unit, now, report.said or "there was no room")
    elif kind in ("stopped", "killed"):
        for task in tasks:
            task.killed += kind == "killed"
        _again(state, unit, report.said or f"its process was {kind}", now)
    else:
        before = {name for task in tasks for name in task.failed_on}
        for task in tasks:
            task.failed_on.append(devices[0])
        _again(state, unit, report.said or "its process ended without its results", now)
        if before <= {devices[0]}:
            fleet.count_failure(state, devices[0], now)
        elif len(before) == 1:  # it fails on unlike devices, so that was not the first one's fault either
            fleet.take_back(state, before.pop(), now)


def _refused(state: State, unit: UnitState, said: str, now: float) -> None:
    """One of its tasks is wrong; alone, each of several shows whether it is the one."""
    tasks = state.members(unit)
    if len(tasks) > 1 and not unit.copy:
        for task in tasks:
            task.alone = True
        units.wait(state, unit, now, said)
    else:
        units.give_up(state, unit, said)


def _again(state: State, unit: UnitState, said: str, now: float) -> None:
    """A process ended too early: resume elsewhere, unless that has been in vain too often."""
    tasks = state.members(unit)
    state.say(now, f"{units.called(unit)} was interrupted on {state.called(tasks[0].device or '')}: {said}")
    if all(len(task.failed_on) < FAILURES and task.killed < KILLS for task in tasks):
        units.wait(state, unit, now, said)
    elif len(tasks) > 1:  # which one is the reason shows when each is alone
        for task in tasks:
            task.alone, task.failed_on, task.killed = True, [], 0
        unit.copy = None
        units.wait(state, unit, now, said)
    else:
        times = count_noun(max(len(tasks[0].failed_on), tasks[0].killed), "time")
        units.give_up(state, unit, f"interrupted {times} in a row without a new checkpoint, at last since {said}")
