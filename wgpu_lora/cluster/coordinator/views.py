"""What people see of a coordinator's state."""

from __future__ import annotations

from dataclasses import replace

from wgpu_lora.cluster.coordinator.choosing import stuck
from wgpu_lora.cluster.coordinator.state import DeviceState, Requests, State, TaskState
from wgpu_lora.cluster.coordinator.taught import awaited, progress_of
from wgpu_lora.cluster.facts import DeviceView, Progress, RunRequest, RunView, Snapshot, Task, TaskView


def snapshot(state: State, requests: Requests, run: str | None, now: float) -> Snapshot:
    """Tasks of one run, or of all; devices, nodes and events are always all."""
    why = stuck(state, requests)
    shown = [request for name, request in requests.items() if run in (None, name)]
    return Snapshot(
        time=now,
        runs=[_run(state, requests, request.name) for request in shown],
        tasks=[
            _task(state, request, state.tasks[f"{request.name}/{task.name}"], task, why)
            for request in shown
            for task in request.tasks
        ],
        devices=[_device(state, name, device) for name, device in state.devices.items()],
        nodes=list(state.nodes),
        events=list(state.events),
    )


def _run(state: State, requests: Requests, name: str) -> RunView:
    known, request = state.runs[name], requests[name]
    return RunView(name, request.by, known.began, known.ended > 0, request.shared, request.sweep)


def _task(state: State, request: RunRequest, task: TaskState, asked: Task, why: dict[str, str]) -> TaskView:
    unit = state.units.get(task.unit)
    cache = awaited(state, request, unit) if unit and unit.phase == "waiting" else None
    return TaskView(
        run=task.run,
        name=task.name,
        state=task.state,
        device=task.device,
        progress=progress_of(cache) if cache else _early(task),
        output=asked.output,
        attempts=task.attempts,
        said=why.get(task.unit) or (cache.said if cache else "") or task.said,
        fetched=task.fetched or (task.over and not task.results),
        params=asked.params,
    )


def _early(task: TaskState) -> Progress:
    """Of a task that has ended before the rest of its pipeline, that it waits for the others."""
    if not task.outcome or task.over:
        return task.progress
    doing = f"{task.outcome}; its pipeline goes on"
    return replace(task.progress, tokens_per_second=None, seconds_left=None, doing=doing)


def _device(state: State, name: str, device: DeviceState) -> DeviceView:
    units = [unit for unit in state.placed() if name in unit.devices]
    rates = [task.progress.tokens_per_second for unit in units for task in state.members(unit)]
    known = [rate for rate in rates if rate is not None]
    return DeviceView(
        facts=device.facts,
        state=device.out or ("busy" if units else "idle"),
        units=[unit.id for unit in units],
        tokens_per_second=sum(known) if known else None,
        failures=device.failures,
    )
