"""Runs: taking, cancelling and forgetting them."""

from __future__ import annotations

from os.path import normpath
from pathlib import PurePath

from wgpu_lora.cluster.coordinator import teaching, units
from wgpu_lora.cluster.coordinator.choosing import Refusals
from wgpu_lora.cluster.coordinator.state import Requests, RunState, State, TaskState
from wgpu_lora.cluster.facts import RunRequest
from wgpu_lora.errors import UserError
from wgpu_lora.text import count_noun, join_words

MOST = 5  # names that a sentence lists
RETAIN_SECONDS = 7 * 86400.0  # how long results wait for somebody to fetch them
MOST_REFUSALS = 8


def tasks_of(state: State, run: str) -> list[TaskState]:
    return [task for task in state.tasks.values() if task.run == run]


def add(state: State, requests: Requests, request: RunRequest, now: float) -> None:
    """Take a run that has been checked."""
    requests[request.name] = request
    state.runs[request.name] = RunState(request.name, now)
    for task in request.tasks:
        taken = TaskState(request.name, task.name, "", since=now)
        state.tasks[taken.id] = taken
        units.new_unit(state, request.name, [task.name])
    teaching.add(state, request)
    by = f", by {request.by}" if request.by else ""
    state.say(now, f"{request.name}: {count_noun(len(request.tasks), 'adapter')} to train{by}")


def check(state: State, requests: Requests, request: RunRequest) -> None:
    """Refuse a run that cannot be taken.

    Raises:
        UserError: its name is known, its tasks' outputs are those of others, or a task can never be placed.
    """
    if request.name in state.runs:
        raise UserError(f"A run '{request.name}' is known already: choose another --name, or attach to that one.")
    if not request.tasks:
        raise UserError(f"Run '{request.name}' has no adapters: give some with --adapters.")
    names = [task.name for task in request.tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"Run '{request.name}' has two adapters '{twice}': give them different names.")
    lacking = next((name for name in names if not request.plans.get(name)), None)
    if lacking is not None:
        raise UserError(f"Adapter '{lacking}' has no memory plan: plan it for the cluster's devices first.")
    for other in requests.values():
        if not state.runs[other.name].ended and _same_place(other, request):
            _check_apart(request, other)
    refusals = Refusals(state, request)
    found = [sentence for name in names if (sentence := refusals.of([name])) is not None]
    if len(found) == 1:
        raise UserError(found[0])
    if found:
        more = [f"and {len(found) - MOST_REFUSALS:,} more"] if len(found) > MOST_REFUSALS else []
        raise UserError(
            f"{count_noun(len(found), 'adapter')} of run '{request.name}' cannot be placed on the cluster's devices:",
            [*found[:MOST_REFUSALS], *more],
        )


def _same_place(one: RunRequest, other: RunRequest) -> bool:
    """Whether results go to one folder: a shared one, whoever asked, or that of one person."""
    return one.shared == other.shared and (one.shared is not None or one.by == other.by)


def _check_apart(request: RunRequest, other: RunRequest) -> None:
    """Raises UserError if an output of the request is one of another run's, lies in one, or has one in it."""
    taken = [PurePath(normpath(task.output)) for task in other.tasks]
    for task in request.tasks:
        output = PurePath(normpath(task.output))
        for place in taken:
            if output == place or place in output.parents or output in place.parents:
                where = "is" if output == place else "overlaps"
                raise UserError(
                    f"{task.output}, the output of adapter '{task.name}', {where} that of an adapter of run "
                    f"'{other.name}', which is not over: choose another output."
                )


def cancel(state: State, run: str, task: str | None, now: float) -> None:
    """End a task, or all of a run: at once where no process is, else with a last copy.

    A run that is only waiting for its results to be written to a shared folder is over then, without them.

    Raises:
        UserError: there is no such run or task.
    """
    if run not in state.runs:
        raise UserError(f"No run '{run}' is known: 'wgpu-lora cluster status' lists all runs.")
    if task is not None and f"{run}/{task}" not in state.tasks:
        names = [one.name for one in state.tasks.values() if one.run == run]
        known = join_words(names[:MOST], max(0, len(names) - MOST))
        raise UserError(f"Run '{run}' has no adapter '{task}': its adapters are {known}.")
    ours = [one for one in tasks_of(state, run) if not one.over and task in (None, one.name)]
    for one in ours:
        one.ending = "cancelled"
    for unit in {one.unit: state.units[one.unit] for one in ours}.values():
        members = state.members(unit)
        if not all(one.ending == "cancelled" for one in members):
            continue
        if unit.phase == "placed" and not unit.answered:
            units.release(state, unit)
            units.cancelled(unit, members)
        elif unit.phase == "waiting":
            units.cancelled(unit, members)
    if ours:
        state.say(now, f"{run}: {task or 'all'} cancelled")
    elif task is None and not state.runs[run].ended:
        state.runs[run].ended = now
        state.say(now, f"{run}: over; results that are not in the shared folder are kept on their hosts for a week")


def settle(state: State, requests: Requests, run: str, now: float) -> None:
    """Note when a run is over."""
    known, tasks = state.runs[run], tasks_of(state, run)
    if known.ended or not all(task.over for task in tasks):
        return
    if requests[run].shared is None or all(task.fetched or not task.results for task in tasks):
        known.ended = now
        state.say(now, f"{run}: all adapters have ended")


def forgettable(state: State, now: float) -> list[str]:
    """Runs that are over, the results of which have been fetched, or by nobody for a week."""
    return [run.name for run in state.runs.values() if run.ended and _unneeded(state, run, now)]


def _unneeded(state: State, run: RunState, now: float) -> bool:
    if now - run.ended > RETAIN_SECONDS:
        return True
    return all(task.fetched or not task.results for task in tasks_of(state, run.name))


def forget(state: State, requests: Requests, run: str) -> None:
    """Forget a run, but not its epochs: a run of the same name must not repeat them."""
    del state.runs[run], requests[run]
    teaching.forget(state, run)
    for task in tasks_of(state, run):
        del state.tasks[task.id]
    for name in [unit.id for unit in state.units.values() if unit.run == run]:
        del state.units[name]
