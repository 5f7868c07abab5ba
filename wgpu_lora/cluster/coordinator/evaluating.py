"""Held-out losses of mirrored copies, measured on another device beside training (`--eval-device`).

Of each task, only the newest copy waits: measuring must not fall behind training. The copy with the results is not
measured, since training does that itself, with the same rows, when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from wgpu_lora.cluster.facts import Copy, RunRequest, Task
from wgpu_lora.errors import UserError

REST_SECONDS = 60.0  # without copies, after which the device is free again

Measure = Callable[[str, str, Task, Copy], Awaitable[dict[str, Any]]]  # of a device, run, task and copy


@dataclass
class _Queue:
    """Copies that wait for a device, by run and task; the oldest entry first."""

    waiting: dict[tuple[str, str], tuple[Task, Copy]] = field(default_factory=dict)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    worker: asyncio.Task[None] | None = None


class Evaluating:
    """Measures one copy at a time on each device.

    Args:
        measure: returns {"step", "loss"}, or nothing if there is nothing to measure any more; raises UserError, or
            ConnectionError if the device's machine is away.
        rest: frees a device. heard: called with run, task, step and loss. said: with a sentence, for people.
    """

    def __init__(
        self,
        measure: Measure,
        rest: Callable[[str], Awaitable[None]],
        heard: Callable[[str, str, int, float], None],
        said: Callable[[str], None],
    ):
        self._measure, self._rest, self._heard, self._said = measure, rest, heard, said
        self._queues: dict[str, _Queue] = {}
        self._steps: dict[tuple[str, str], int] = {}  # the newest that was measured

    def copied(self, copy: Copy, tasks: list[Task], request: RunRequest) -> None:
        """A copy has been accepted: measure it, instead of an older one of the same tasks that still waits."""
        device = request.eval_device
        if device is None or copy.final:
            return
        queue = self._queues.setdefault(device, _Queue())
        for task in tasks:
            at = (request.name, task.name)
            if copy.steps.get(task.name, 0) <= self._steps.get(at, 0) or not _heldout(request, task):
                continue
            queue.waiting[at] = task, copy  # keeps its place in the line
            queue.came.set()
        if queue.waiting and (queue.worker is None or queue.worker.done()):
            queue.worker = asyncio.get_running_loop().create_task(self._work(device, queue))

    def forget(self, run: str) -> None:
        """Forget which steps of a run were measured, and what waits."""
        self._steps = {at: step for at, step in self._steps.items() if at[0] != run}
        for queue in self._queues.values():
            queue.waiting = {at: one for at, one in queue.waiting.items() if at[0] != run}

    async def _work(self, device: str, queue: _Queue) -> None:
        while queue.waiting:
            queue.came.clear()
            at = next(iter(queue.waiting))
            task, copy = queue.waiting.pop(at)
            await self._one(device, at, task, copy)
            if not queue.waiting:
                with suppress(TimeoutError):
                    await asyncio.wait_for(queue.came.wait(), REST_SECONDS)
        await self._rest(device)

    async def _one(self, device: str, at: tuple[str, str], task: Task, copy: Copy) -> None:
        run, name = at
        try:
            found = await self._measure(device, run, task, copy)
        except (UserError, ConnectionError) as error:
            self._said(f"{run}: the held-out loss of {name} was not measured: {error}")
            return
        if found and found["step"] > self._steps.get(at, 0):
            self._steps[at] = found["step"]
            self._heard(run, name, found["step"], found["loss"])


def _heldout(request: RunRequest, task: Task) -> bool:
    return any(plan.heldout for plan in request.plans.get(task.name, {}).values())
