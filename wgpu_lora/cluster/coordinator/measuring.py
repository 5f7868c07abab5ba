"""The coordinator's way to the actors that measure held-out losses, and their record. Imports Ray."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from wgpu_lora.cluster.coordinator.board import Board
from wgpu_lora.cluster.coordinator.evaluating import Evaluating
from wgpu_lora.cluster.coordinator.taught import as_trained
from wgpu_lora.cluster.facts import Copy, Report, Task, to_plain
from wgpu_lora.cluster.node.evaluator import MEASURE_SECONDS
from wgpu_lora.cluster.node.evaluator_actor import evaluation_device
from wgpu_lora.cluster.node.plainly import accepted
from wgpu_lora.json_files import to_json

MOST = 100_000  # lines of a run that are told


class Measuring:
    """Evaluations of all runs with an evaluation device.

    Args:
        place: directory of the records, a file of JSON lines for each run.
    """

    def __init__(self, board: Board, place: Path, now: Any):
        self._board, self._place, self._now = board, place, now
        self._handles: dict[str, Any] = {}
        self._evaluating = Evaluating(self._measure, self._rest, self._heard, lambda text: board.state.say(now(), text))

    def told(self, report: Report) -> None:
        """Look at a report after the board has: a copy that was accepted is measured."""
        unit = self._board.state.units.get(report.unit)
        if report.copy is None or unit is None or unit.copy != report.copy:
            return
        run = report.unit.partition("/")[0]
        request = self._board.requests[run]
        state, steps = self._board.state, report.copy.steps
        tasks = [as_trained(state, request, task) for task in request.tasks if task.name in steps]
        self._evaluating.copied(report.copy, tasks, request)

    def evaluations(self, run: str) -> list[dict[str, Any]]:
        """What was measured of a run, in order: task, step, eval_loss and time."""
        file = self._place / f"{run}.jsonl"
        lines = file.read_text().splitlines()[:MOST] if file.is_file() else []
        found = []
        for line in lines:
            with suppress(ValueError):  # cut off by a crash
                found.append(json.loads(line))
        return found

    def forget(self, run: str) -> None:
        """Forget what was measured of a run: another one may get its name."""
        self._evaluating.forget(run)
        with suppress(OSError):
            (self._place / f"{run}.jsonl").unlink(missing_ok=True)

    async def _measure(self, device: str, run: str, task: Task, copy: Copy) -> dict[str, Any]:
        known = self._board.state.devices.get(device)
        if known is None or known.gone:
            raise ConnectionError("its device is gone")
        try:
            if device not in self._handles:
                place = known.node, known.facts.address, known.facts.key
                self._handles[device] = await asyncio.to_thread(evaluation_device, *place)
            answer = self._handles[device].measure.remote(run, to_plain(task), to_plain(copy))
            found: dict[str, Any] = accepted(
                await asyncio.wait_for(asyncio.wrap_future(answer.future()), MEASURE_SECONDS)
            )
        except (ray.exceptions.RayError, LookupError, TimeoutError) as error:
            self._handles.pop(device, None)
            raise ConnectionError(f"its machine does not answer ({type(error).__name__})") from error
        return found

    async def _rest(self, device: str) -> None:
        handle = self._handles.pop(device, None)
        if handle is not None:
            with suppress(ray.exceptions.RayError, TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(handle.rest.remote().future()), MEASURE_SECONDS)
            await asyncio.to_thread(ray.kill, handle)

    def _heard(self, run: str, task: str, step: int, loss: float) -> None:
        self._board.heldout(run, task, step, loss)
        line = {"task": task, "step": step, "eval_loss": loss, "time": time.time()}
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            with (self._place / f"{run}.jsonl").open("a") as file:
                file.write(to_json(line) + "\n")
        except OSError as error:
            self._board.state.say(self._now(), f"{run}: a held-out loss is not recorded ({error.strerror})")
