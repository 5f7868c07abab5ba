"""Held-out losses of copies, measured by a process on this host's device. No Ray."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from wgpu_lora.cluster.facts import Task
from wgpu_lora.cluster.node.layout import ADAPTERS, checked_part
from wgpu_lora.cluster.node.listing import FileFacts, Listing
from wgpu_lora.cluster.node.transfer import Read, fetch
from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS
from wgpu_lora.train.run.run_checkpoint import LAST, STEPS
from wgpu_lora.train.run.run_state import STATE, read_state
from wgpu_lora.worker.worker import Worker, WorkerFailed

MEASURE_SECONDS = 3600.0  # large models on slow devices take long
_STEP = re.compile(rf"{STEPS}/step-([0-9]{{1,15}})")


class Evaluator:
    """Measures one adapter after another; the process and its base model stay between them.

    Args:
        place: a directory of its own. index: the device's index, or None if it has vanished.
    """

    def __init__(self, place: Path, index: Callable[[], int | None]):
        self._place, self._index = place, index
        self._worker: Worker | None = None

    def measure(self, run: str, task: Task, files: Listing, read: Read) -> dict[str, Any]:
        """The step and the held-out loss of a task's newest checkpoint in a copy.

        Args:
            task: with the paths of this host. files: of the copy. read: a piece of one of them.

        Raises:
            UserError: the copy has no adapter, or it cannot be measured.
        """
        target = self._place / checked_part(run) / checked_part(task.name)
        shutil.rmtree(target, ignore_errors=True)
        try:
            folder, wanted = newest_adapter(task.name, files)
            short = [replace(file, path=file.path.rpartition("/")[2]) for file in wanted]
            fetch(short, target, lambda file, offset: read(replace(file, path=f"{folder}/{file.path}"), offset))
            step = read_state(target)[0].step
            found = self._asked(f"{run}/{task.name}", task.options, target)
        finally:
            shutil.rmtree(target, ignore_errors=True)
        loss = found.get("loss")
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            raise UserError(f"The held-out loss of {task.name} after step {step} is not finite: look at its data.")
        return {"step": step, "loss": float(loss)}

    def _asked(self, name: str, options: dict[str, Any], adapter: Path) -> dict[str, Any]:
        if self._worker is None or not self._worker.running():
            self.rest()
            index = self._index()
            if index is None:
                raise UserError("The device for evaluations has vanished from its host.")
            self._worker = Worker("heldout", {"device": index}, asked=True)
        try:
            found = self._worker.ask("measure", name=name, options=options, adapter=str(adapter))
        except WorkerFailed as error:
            self.rest()
            raise UserError(f"The held-out loss of {name} could not be measured: {error}") from None
        if "refused" in found:
            raise UserError(str(found["refused"]))
        return found

    def rest(self) -> None:
        """End the process, so that no memory of the device is held."""
        worker, self._worker = self._worker, None
        if worker:
            with suppress(WorkerFailed, OSError):
                worker.end()
            worker.close()


def newest_adapter(task: str, files: Listing) -> tuple[str, list[FileFacts]]:
    """The folder of a task's newest checkpoint in a copy, and the files there that make an adapter.

    Raises:
        UserError: there is none.
    """
    root = f"{ADAPTERS}/{task}/"
    by_folder: dict[str, dict[str, FileFacts]] = {}
    for file in files:
        folder, _, name = file.path.rpartition("/")
        if file.path.startswith(root) and name in (WEIGHTS, CONFIG, STATE):
            by_folder.setdefault(folder.removeprefix(root), {})[name] = file

    def age(folder: str) -> int:
        step = _STEP.fullmatch(folder)
        return int(step[1]) if step else 1 << 60 if folder == LAST else -1

    whole = {folder: found for folder, found in by_folder.items() if len(found) == 3 and age(folder) >= 0}
    if not whole:
        raise UserError(f"The copy of {task} has no checkpoint of an adapter.")
    newest = max(whole, key=age)
    return root + newest, list(whole[newest].values())
