"""An actor that holds a device and trains the tasks of a unit: one adapter, or a pipeline of several."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from wgpu_lora.cluster.actors.data_parallel import leader_of
from wgpu_lora.cluster.actors.host_actor import host_store, host_stores, place_parcels, reset_environment
from wgpu_lora.cluster.actors.unit_progress import UnitProgress
from wgpu_lora.cluster.checkpoint_store import DamagedCheckpoint, Store, restore_files, shared_store, store_files
from wgpu_lora.cluster.cluster_paths import ADAPTERS, MULTI_ADAPTER, checked_part, options_here, unit_directory
from wgpu_lora.cluster.device_resources import device_index, hold_device
from wgpu_lora.cluster.messages import Commit, Order, Report, StoredFile, Task
from wgpu_lora.cluster.worker.job_process import EventWriter
from wgpu_lora.cluster.worker.kinds.training_jobs import prepare_adapters, prepare_finetune
from wgpu_lora.errors import StorageError, UserError
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.train.adapter_tasks import split_options
from wgpu_lora.train.job import LOCK
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.multi_adapter_state import read_multi_adapter_state
from wgpu_lora.train.run.run_state import STATE, read_state

NEVER = 1 << 30  # steps between held-out losses that another device measures
OWN = ("output", "device", "resume", "overwrite", "requests")  # options that are not a task's
NO_ROOM = ("NoRoomError", "OutOfDeviceMemory")
# Errors of a device, which another one may not have, though they are a person's to solve.
OF_DEVICE = ("DeviceError", "BindingTooLarge", "GridTooLarge", "DeviceLost", "WrongResults", "StorageError")
RETRY_SECONDS, PATIENCE = 2.0, 600.0  # between tries to store results, and for all of them


class Cancelled(Exception):
    """The unit was cancelled before its first step."""


class StorageUnavailable(Exception):
    """Results could not be stored, which is no fault of the device."""


class StaleActor(Exception):
    """Another actor has the unit: this one must not write any of its files."""


class TrainingActor:
    """Trains an order on a thread of its own, so that calls are answered meanwhile."""

    def __init__(self, order: Order, controller: Any):
        reset_environment()
        self._order, self._controller = order, controller
        self._directory = unit_directory(order.unit) / f"generation-{order.generation}"
        self._progress = UnitProgress([task.name for task in order.tasks])
        self._unit_files = UnitFiles(self._directory)
        self._stored_steps: dict[str, int] = {}
        self._cancelled = threading.Event()
        self._ending: set[str] = set()
        self._job: Any = None
        self._leader: Any = None  # shares the steps with the replicas
        self._end: tuple[str, str] | None = None
        self._problem = ""  # with the newest checkpoint
        threading.Thread(target=self._run, name=order.unit, daemon=True).start()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        end, why = self._end or (None, "")
        alone = self._leader.problem if self._leader and not end else ""
        text = " ".join(part for part in (why, self._problem, alone) if part)
        return Report(dict(self._progress.progress), dict(self._progress.outcomes), end, text)

    def cancel(self) -> None:
        """End training with a last checkpoint."""
        self._cancelled.set()

    def end(self, names: Sequence[str]) -> None:
        """End tasks, with their results, after the current step."""
        self._ending.update(names)
        self._pass_on_ends()

    def pid(self) -> int:
        return os.getpid()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        end, why = "failed", "its thread has ended"
        try:
            end, why = self._run_to_end()
        except BaseException as error:
            why = _sentence(error)
        finally:
            self._end = end, why

    def _run_to_end(self) -> tuple[str, str]:
        try:
            end, why = self._train()
            self._commit_results(whole=True)
        except StaleActor:
            shutil.rmtree(self._directory, ignore_errors=True)
            end, why = "stopped", "its device was taken for lost, and it goes on elsewhere."
        except Cancelled:
            end, why = "stopped", ""
            with suppress(Exception):
                self._commit_results(whole=False)
        except StorageUnavailable as error:
            end, why = "stopped", str(error)
        except DamagedCheckpoint as error:
            end, why = "no checkpoint", str(error)
        except ConnectionError as error:  # which is no fault of this device
            end, why = "stopped", f"a host that has its checkpoint or data is away: {error}"
        except BaseException as error:
            end, why = _kind(error), _sentence(error)
            if self._order.mirror_steps:  # the newest checkpoint of a run that failed
                with suppress(Exception):
                    self._commit_results(whole=False)
        return end, why

    def _train(self) -> tuple[str, str]:
        order = self._order
        index = device_index(order.key)
        if index is None:
            raise StorageError("The device is not there any more: look at 'wgpu-lora cluster status'.")
        self._restore()
        tasks = [replace(task, options=self._options(task)) for task in order.tasks]
        events = _ActorEvents(self)
        resume = order.resume is not None
        with ExitStack() as stack:
            stack.enter_context(hold_device(order.key))
            if len(tasks) == 1:
                output = self._directory / ADAPTERS / checked_part(tasks[0].name)
                options = {**tasks[0].options, "device": index, "output": str(output)} | (
                    {"resume": True} if resume else {}
                )
                self._leader = leader_of(order.replicas) if order.replicas else None
                prepared: tuple[Any, Callable[[Any], str]] = prepare_finetune(options, order.unit, leader=self._leader)
            else:
                prepared = prepare_adapters(*self._joined_options(tasks, index, resume), order.unit)
            self._job, text = prepared
            self._pass_on_ends()
            record = self._job.train(events)
        return ("stopped" if self._cancelled.is_set() else "done"), text(record)

    def _options(self, task: Task) -> dict[str, Any]:
        """The options of a task on this host."""
        order = self._order
        place_parcels(task.options, order.parcels)
        options = {name: value for name, value in task.options.items() if value is not None and name not in OWN}
        save_steps = options.get("save_steps") or order.save_steps
        options["save_steps"] = min(save_steps, order.save_steps) if order.save_steps > 0 else save_steps
        if order.heldout_elsewhere:
            options |= {"eval_steps": NEVER, "eval_on_start": False}
        return options_here(options)

    def _joined_options(
        self, tasks: Sequence[Task], index: int, resume: bool
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The shared options of a pipeline, and the tables of its adapters."""
        names = [checked_part(task.name) for task in tasks]
        split = [split_options(task.options) for task in tasks]
        adapters = [
            {**adapter_options, "name": name, "checkpoint": str(self._directory / ADAPTERS / name)}
            for name, (adapter_options, _) in zip(names, split, strict=True)
        ]
        shared = {**split[0][1], "save_steps": min(common["save_steps"] for _, common in split)}
        shared |= {"device": index, "output": str(self._directory / MULTI_ADAPTER)} | (
            {"resume": True} if resume else {}
        )
        return shared, adapters

    def _pass_on_ends(self) -> None:
        job = self._job
        for name in list(self._ending) if job else ():
            job.requests.end(name if len(self._order.tasks) > 1 else None)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Make the directory, from the commit to resume from if there is one, and remove those of older generations."""
        order, parent = self._order, self._directory.parent
        for old in parent.iterdir() if parent.is_dir() else ():
            if old != self._directory:
                shutil.rmtree(old, ignore_errors=True)
        if order.resume is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            return
        self._progress.doing("copying the checkpoint")
        hosts = [host_store(node) for node in order.hosts]
        restore_files([*self._stores(), *hosts], order.unit, order.resume.files, self._directory)
        self._progress.resume(self._directory)
        self._stored_steps = dict(order.resume.steps)

    def _stores(self) -> list[Store]:
        """Where checkpoints are written: the storage of all hosts, or this host's folder and those of its mirrors."""
        if self._order.storage:
            return [shared_store(self._order.storage)]
        return host_stores(self._order.mirrors)

    def store_checkpoint(self) -> None:
        """Store the newest checkpoint if `mirror_steps` steps were taken since the last one that was."""
        steps, mirror = self._progress.saved, self._order.mirror_steps
        if mirror and any(step - self._stored_steps.get(name, 0) >= mirror for name, step in steps.items()):
            self._commit(ended=False, final=False)

    def _commit(self, *, ended: bool, final: bool) -> bool:
        """Store the unit's files; returns whether that could be done.

        Raises:
            StaleActor: the unit is another actor's.
        """
        order = self._order
        try:
            if ended:
                self._unit_files.remove_leftovers()
            files, steps, stores = self._unit_files.files(ended), self._unit_files.steps(), self._stores()
            complete, before = store_files(stores, order.unit, self._directory, files)
            addresses = [ray.util.get_node_ip_address(), *map(address_of, order.mirrors)]
            hosts = [] if order.storage else [addresses[number] for number in complete]
            commit = Commit(order.unit, order.generation, steps, files, hosts, final, dict(self._progress.outcomes))
            if not ray.get(self._controller.commit.remote(commit), timeout=PATIENCE):
                raise StaleActor
            for number in complete:  # of files that came later, another actor may be the owner
                with suppress(OSError, StorageError, ConnectionError):
                    stores[number].remove(order.unit, before[number] - {file.digest for file in files})
        except StaleActor:
            raise
        except Exception as error:
            self._problem = f"Its newest checkpoint could not be stored: {_sentence(error)}"
            return False
        self._stored_steps = steps
        self._problem = "" if len(complete) == len(stores) else "its checkpoints are stored on its own host only"
        return True

    def _commit_results(self, whole: bool) -> None:
        """Store what training has left: its results, or the newest checkpoint of a run that failed.

        Raises:
            StaleActor: the unit is another actor's. StorageUnavailable: results could not be stored.
        """
        if whole:
            self._progress.doing("copying the results")
        until = time.monotonic() + PATIENCE
        while not self._commit(ended=True, final=whole):
            if not whole:
                return
            if time.monotonic() > until:  # what another actor would train again is worth waiting for
                raise StorageUnavailable(self._problem or "the results could not be stored")
            time.sleep(RETRY_SECONDS)
        shutil.rmtree(self._directory, ignore_errors=True)


class _ActorEvents(EventWriter):
    """Passes events on to the actor's progress; ends training that was cancelled."""

    def __init__(self, actor: TrainingActor):
        self._actor = actor

    def emit(self, event: str, **facts: Any) -> None:
        actor = self._actor
        actor._progress.take({"event": event, "time": time.time(), **facts})
        if event == "saved":
            actor.store_checkpoint()
        if actor._cancelled.is_set() and event in ("waiting", "tuning", "loading"):
            raise Cancelled

    def step(self, result: Any) -> bool | None:
        super().step(result)
        return self._actor._cancelled.is_set() or None


def address_of(node: str) -> str:
    """The address of a node. Raises ConnectionError if Ray does not know it."""
    for entry in ray.nodes():
        if entry["NodeID"] == node:
            return str(entry["NodeManagerAddress"])
    raise ConnectionError(f"Ray does not know the node {node:.8}")


def _kind(error: BaseException) -> str:
    """How a training ended that raised an error, as a Report names it."""
    name = type(error).__name__
    if name in NO_ROOM:
        return "no room"
    if isinstance(error, UserError) and name not in OF_DEVICE:
        return "refused"
    return "failed"


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


# -- the files of a unit -----------------------------------------------------------------------------------------------

KEPT = 2  # checkpoints of a run that goes on: a ruined adapter falls back to the one before the newest
TEMPORARY = re.compile(r"\..*\.(tmp|previous|old)")


class UnitFiles:
    """The files of a unit's directory that are stored as a checkpoint; only changed ones are digested again.

    They are listed in the thread that trains, between two steps. Trainers write checkpoints beside, and rename them, so
    that a run goes on from its directory as it is at any moment.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._digests: dict[tuple[int, int, int], str] = {}  # by inode, time and size

    def files(self, ended: bool = False) -> list[StoredFile]:
        """Those that a resumed run needs; of a run that has ended, all. Raises OSError."""
        files = []
        for root in self._roots():
            checkpoints = [] if ended else run_checkpoint.list_checkpoints(root / run_checkpoint.STEPS)
            old = {path for _, path in checkpoints[:-KEPT]}
            files += [self._stored_file(path) for path in _files_below(root) if old.isdisjoint(path.parents)]
        return files

    def steps(self) -> dict[str, int]:
        """The step that each task would be resumed from. Raises UserError if a checkpoint is damaged."""
        if (self.directory / MULTI_ADAPTER / STATE).is_file():
            return read_multi_adapter_state(self.directory / MULTI_ADAPTER).steps
        newest = {root.name: run_checkpoint.latest_checkpoint(root) for root in self._roots()[1:]}
        return {name: read_state(path)[0].step for name, path in newest.items() if path}

    def remove_leftovers(self) -> None:
        """Put in order what a run that has ended left unfinished."""
        for root in self._roots():
            run_checkpoint.remove_run_leftovers(root)

    def _roots(self) -> list[Path]:
        adapters = self.directory / ADAPTERS
        return [self.directory / MULTI_ADAPTER, *(sorted(adapters.iterdir()) if adapters.is_dir() else ())]

    def _stored_file(self, path: Path) -> StoredFile:
        stat = path.stat()
        key = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if key not in self._digests:
            self._digests[key] = file_digest(path)
        return StoredFile(path.relative_to(self.directory).as_posix(), self._digests[key], stat.st_size)


def _files_below(root: Path) -> Iterator[Path]:
    """The files below a directory but temporary ones and locks; links are left out."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.is_symlink() or path.name == LOCK or TEMPORARY.fullmatch(path.name):
            continue
        if path.is_dir():
            yield from _files_below(path)
        elif path.is_file():
            yield path
