"""The actor of `--eval-device`: held-out losses of checkpoints while others train, and caches of teachers."""

from __future__ import annotations

import math
import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wgpu_lora.api.call_arguments import path_as_text
from wgpu_lora.cluster.actors.host_actor import host_stores, reset_environment
from wgpu_lora.cluster.checkpoint_store import FolderStore, restore_files, shared_store, store_files
from wgpu_lora.cluster.cluster_paths import ADAPTERS, checked_part, checkpoints_directory, cluster_root, options_here
from wgpu_lora.cluster.data_upload import MAX_CACHE_BYTES, MAX_CACHE_FILES, parcel, place_parcel
from wgpu_lora.cluster.device_resources import device_index
from wgpu_lora.cluster.messages import Commit, Parcel, StoredFile, Task
from wgpu_lora.cluster.worker.kinds.training_jobs import make_teacher_caches
from wgpu_lora.data import split_python_rows
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, Events
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.objective_eval import evaluate_objective
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import with_demo_data, with_stored_dtype
from wgpu_lora.train.prepare_run import prepare_run
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.run.run_checkpoint import LAST, STEPS
from wgpu_lora.train.run.run_state import STATE, read_state
from wgpu_lora.train.session.data_stream import heldout_options

# Set by each adapter's own config, also where its file differs from training's form (PiSSA doubles the rank).
OF_ADAPTERS = ("lora_r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "init_lora_weights", "init_adapter")
_STEP = re.compile(rf"{STEPS}/step-([0-9]{{1,15}})")


class EvaluationActor:
    """Measures one adapter after another, and makes caches between them. Keeps one opened model.

    Args:
        key: of the device.
    """

    def __init__(self, key: str):
        reset_environment()
        self._key, self._root = key, cluster_root() / "evaluations"
        self._device: Device | None = None
        self._model: tuple[tuple[str, str], LoadedModel] | None = None
        self._runs: dict[str, tuple[dict[str, Any], AdapterRun]] = {}
        self._turn = threading.Lock()
        self._making, self._progress = ("", ""), _CacheProgress()

    def measure(
        self, run: str, task: Task, commit: Commit, nodes: Sequence[str], storage: str | None
    ) -> tuple[int, float]:
        """The step and the held-out loss of a task's newest checkpoint in a commit.

        Args:
            nodes: ids of those that have its files.

        Raises:
            UserError: the checkpoint has no adapter, or cannot be measured. DamagedCheckpoint: it cannot be read.
        """
        target = self._root / checked_part(run) / checked_part(task.name)
        stores = [shared_store(storage)] if storage else host_stores(nodes)
        with self._turn:
            try:
                restore_files(stores, commit.unit, newest_adapter(task.name, commit.files), target)
                step = read_state(target)[0].step
                loss = self._loss(f"{run}/{task.name}", options_here(task.options), target)
            finally:
                shutil.rmtree(target, ignore_errors=True)
        if not math.isfinite(loss):
            raise UserError(f"The held-out loss of {task.name} after step {step} is not finite: look at its data.")
        return step, loss

    def _loss(self, name: str, options: dict[str, Any], adapter: Path) -> float:
        run, model = self._read(name, options)
        assert run.heldout
        defaults = TrainingArguments()
        adapter_options = {option: getattr(defaults, option) for option in OF_ADAPTERS}
        args = replace(heldout_options(run.args), **adapter_options | {"init_adapter": str(adapter)})
        return float(dict(evaluate_objective(model, run.heldout, args))["loss"])

    def _read(self, name: str, options: dict[str, Any]) -> tuple[AdapterRun, LoadedModel]:
        entry, where = self._runs.get(name), "an evaluation"
        texts, rows = split_python_rows({key: path_as_text(value, key, where) for key, value in options.items()})
        args = with_demo_data(resolve_options(texts, None, where)[0])
        model = self._load_model(args)
        if entry and entry[0] == options:
            return entry[1], model
        run = prepare_run(with_stored_dtype(replace(args, resume=False), model), model, rows=rows)
        if not run.heldout:
            raise UserError(f"{name} has no held-out rows: give --eval-data or --validation-split.")
        self._runs[name] = options, run
        return run, model

    def _load_model(self, args: TrainingArguments) -> LoadedModel:
        key = args.model or "demo", args.base_dtype
        if self._model is None or self._model[0] != key:
            self._model, self._runs = None, {}  # a device may not have the room for two
            if self._device is None:
                self._device = Device(self._index())
            self._model = key, open_model(key[0], base_dtype=key[1], device=self._device)
        return self._model[1]

    def _index(self) -> int:
        index = device_index(self._key)
        if index is None:
            raise UserError("The device for evaluations is not on its host any more: see 'wgpu-lora cluster status'.")
        return index

    # -- teacher caches ------------------------------------------------------------------------------------------------

    def make_caches(self, run: str, name: str, options: dict[str, Any]) -> dict[str, Parcel]:
        """The teacher caches of a task with these options, as parcels in this host's folder, by the options' names.

        What an interrupted actor has finished is kept.

        Raises:
            UserError: the options, the data or the teacher are unsuitable.
        """
        root = cluster_root() / "caches" / checked_part(run) / checked_part(name)
        training = {key: value for key, value in options_here(options).items() if value is not None}
        with self._turn:
            self._model, self._runs = None, {}
            self._making, self._progress = (run, name), _CacheProgress()
            directories = make_teacher_caches(training, "a teacher cache", self._index(), root, self._progress)
        store = FolderStore(checkpoints_directory())
        parcels = {key: parcel(path, MAX_CACHE_BYTES, MAX_CACHE_FILES) for key, path in directories.items()}
        for key, cache in parcels.items():
            store_files([store], cache.unit, Path(directories[key]).parent, cache.files)
            place_parcel([store], cache)
        return parcels

    def cache_progress(self, run: str, name: str) -> tuple[int, int]:
        """Finished rows and all rows of these caches; zeros while other caches are made."""
        return (self._progress.rows, self._progress.total) if self._making == (run, name) else (0, 0)


@dataclass
class _CacheProgress(Events):
    rows: int = 0
    total: int = 0

    def evaluating(self, evaluating: Evaluating) -> None:
        self.rows, self.total = evaluating.rows, evaluating.total


def newest_adapter(task: str, files: Sequence[StoredFile]) -> list[StoredFile]:
    """The files of a task's newest checkpoint that make an adapter, by their names in its folder.

    Raises:
        UserError: there is none.
    """
    root = f"{ADAPTERS}/{task}/"
    by_folder: dict[str, list[StoredFile]] = {}
    for file in files:
        folder, _, name = file.path.rpartition("/")
        if file.path.startswith(root) and name in (WEIGHTS, CONFIG, STATE):
            by_folder.setdefault(folder.removeprefix(root), []).append(replace(file, path=name))

    def age(folder: str) -> int:
        step = _STEP.fullmatch(folder)
        return int(step[1]) if step else 1 << 60 if folder == LAST else -1

    complete = [folder for folder, members in by_folder.items() if len(members) == 3 and age(folder) >= 0]
    if not complete:
        raise UserError(f"The checkpoint of {task} has no adapter.")
    return by_folder[max(complete, key=age)]
