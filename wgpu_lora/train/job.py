"""A job: locks, device memory, tuning, loading, training and results of the runs of a session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from filelock import Timeout
from safetensors import SafetensorError

from wgpu_lora.errors import StorageError, UserError, reason
from wgpu_lora.events import SILENT, Events
from wgpu_lora.files.locks import check_output, lock_file, unlink_lock
from wgpu_lora.gpu.memory_leases import budget_bytes, claim
from wgpu_lora.gpu.tuner import Tuner, tuning_enabled
from wgpu_lora.gpu.tuning_cache import Choices
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.train.data_parallel.leader import DataParallelLeader
from wgpu_lora.train.loop.slot_policy import Synchronized, make_policy
from wgpu_lora.train.loop.trainer import Trainer
from wgpu_lora.train.memory import Replan, check_memory, options_that_fit
from wgpu_lora.train.objective_eval import open_unrounded_model, unrounded_loss
from wgpu_lora.train.prepare_session import prepare_session
from wgpu_lora.train.run import disk_space, run_checkpoint
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.run.multi_adapter_run import MultiAdapterRun
from wgpu_lora.train.run.records import PipelineRecord, RunRecord
from wgpu_lora.train.run.run_tracking import track_runs
from wgpu_lora.train.run.stop_reasons import Requests
from wgpu_lora.train.session.session import Session

LOCK = ".lock"
Record = TypeVar("Record", RunRecord, PipelineRecord)  # its result


@dataclass(repr=False)
class Job(Generic[Record]):
    """A session and the runs of its slots; nothing is allocated yet. A run of one adapter has slot 0.

    Attributes:
        sharing: of a single run, with replicas on other devices.
        shared: the state and the record of several adapters; None for a single run.
        requests: of other threads, while it trains.
        records: of the runs that have ended, by slot.
    """

    session: Session
    runs: Sequence[AdapterRun]
    replan: Replan
    sharing: DataParallelLeader | None = None
    shared: MultiAdapterRun | None = None
    requests: Requests = field(default_factory=Requests, kw_only=True)
    records: dict[int, RunRecord] = field(default_factory=dict, init=False)
    _disk_bytes: int = field(default=0, init=False)  # that the run needs

    @property
    def run(self) -> AdapterRun:
        """The only run, or the first."""
        return self.runs[0]

    def __repr__(self) -> str:
        return f"Job({', '.join(repr(str(run.directory)) for run in self.runs)})"

    @property
    def home(self) -> Path:
        """The directory of the job's record."""
        return self.shared.home if self.shared else self.run.directory

    def directories(self) -> list[Path]:
        """The directories that the job writes to and locks."""
        return distinct([*(run.directory for run in self.runs), self.home])

    def check_memory(self) -> None:
        """Raise UserError if the device has too little memory, naming options that would make the run fit."""
        args = self.run.args
        budget = budget_bytes(self.session.device.info, args.budget())
        plan = self.session.memory()
        check_memory(plan.peak_device_bytes, plan.groups["base"], budget, args, self.replan)

    def train(self, events: Events = SILENT) -> Record:
        """Wait for device memory, tune kernels, load the weights, train and write; returns the record.

        Raises:
            UserError: for example, a directory is in use or the disk is full.
        """
        self.check_memory()
        info, args = self.session.device.info, self.run.args
        budget, need = budget_bytes(info, args.budget()), self.session.needs()
        with ExitStack() as stack:
            for directory in self.directories():
                stack.enter_context(locked(directory))
            label = f"finetune {self.directories()[-1]}"
            seconds = args.wait_seconds()
            stack.enter_context(claim(self.session.device, need, label, budget, seconds, events, self._fitting_options))
            stack.enter_context(track_runs(self.runs, info, self.home, events))
            try:
                for run in self.runs:
                    if run.rollouts:
                        run.rollouts.rewards.load()
                    run.prepare_directory()
                device = self.session.device
                self._begin(events)
                device.peak_allocated = device.allocated  # of this run only
                self.session.allocate(events, self.choose_tilings(events))
                return self._train(events)
            finally:
                self.session.close()
                for run in self.runs:
                    if run.rollouts:
                        run.rollouts.close()

    def _fitting_options(self, free: int) -> str:
        """Options that would make the run fit into the free memory."""
        result = options_that_fit(free, self.run.args, self.replan)
        return f"run with {result}" if result else ""

    def tuner(self) -> Tuner | None:
        """The tuner of kernel tilings; None if the run is resumed or uses the defaults."""
        args = self.run.args
        return Tuner(self.session.device, retune=args.retune) if tuning_enabled(args.tune) and not args.resume else None

    def choose_tilings(self, events: Events) -> Choices:
        """The tilings of the run's kernels, timed unless they are known. Raises UserError if a kernel has none."""
        tuner = self.tuner()
        with verdicts_of(self.session.device).reported_to(events):
            choices = tuner.tune(self.session.programs(), events) if tuner else self.run.state.tiles
        for run in self.runs:
            run.state.tiles = choices
        return choices

    def _train(self, events: Events) -> Record:
        try:
            for run in self.runs:
                run.place(self.session)
            self._disk_bytes = disk_space.reserve(self.session, self.runs)
            for run in self.runs:
                run.precompute(self.session, events)
            self.session.release_references()
            return self._result(events)
        except (OSError, SafetensorError) as error:  # safetensors raises its own error if the disk is full
            raise self._unwritten(error) from error
        finally:
            disk_space.release(self.runs)

    def _unwritten(self, error: Exception) -> StorageError:
        """The error for a file that could not be written: which results exist, and how to continue."""
        where = getattr(error, "filename", None) or self.directories()[-1]
        full = getattr(error, "errno", None) in disk_space.FULL and self._disk_bytes
        mend = f"make room for {self._disk_bytes + disk_space.GROWTH:,} bytes there" if full else "fix that"
        state = self.newest_state()
        newest = f"the newest complete state is {state}" if state else "there is no complete state yet"
        go_on = f"go on with {setting('resume', True)}" if state else "start again"
        return StorageError(f"Writing to {where} failed ({reason(error)}), and {newest}: {mend} and {go_on}.")

    def newest_state(self) -> Path | None:
        """The newest state on disk that the job can be resumed from."""
        if self.shared:
            return self.shared.state_file
        result = run_checkpoint.latest_checkpoint(self.run.directory, self.run.storage)
        return result and self.run.storage.disk_path(result)

    def _begin(self, events: Events) -> None:
        """What precedes the allocation of the device's memory: the record of an overwritten run of several adapters
        goes, and the loss of a model that a rounded one replaces is measured."""
        run = self.run
        if self.shared:
            if self.shared.args.overwrite:
                run_checkpoint.remove_run(self.shared.home)
        elif run.args.rounded_from and run.heldout and not run.resumed_from:
            model = open_unrounded_model(run.args, self.session.device, self.session.model.config)
            before = prepare_session(model, [run], evaluation_only=True)
            run.state.unrounded_eval_loss = unrounded_loss(before, run, events)

    def _result(self, events: Events) -> Record:
        """Train and write the results."""
        shared = self.shared
        policy = make_policy(shared.schedule, shared.state.policy or None) if shared else Synchronized()
        trainer = Trainer(
            self.session, self.runs, events, policy, sharing=self.sharing, shared=shared, requests=self.requests
        )
        self.records = trainer.train()
        result: Any = self.records[self.run.slot]
        if shared:
            result = shared.write(self.session, self.runs, self.records, trainer.step, trainer.signal)
        return result  # type: ignore[no-any-return]


def distinct(directories: Sequence[Path]) -> list[Path]:
    """The directories, each once."""
    return list({directory.resolve(): directory for directory in directories}.values())


@contextmanager
def locked(directory: Path, name: str = LOCK) -> Iterator[None]:
    """Lock a directory against other processes, by a file of that name in it, which goes at the end. The directory is
    created if missing, and removed again if it stays empty."""
    check_output(directory, flag("output"))
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock_file(directory / name).lock
    except Timeout:
        raise UserError(
            f"Another process is writing to {directory}: wait for it, or choose another directory."
        ) from None
    except OSError as error:
        raise UserError(
            f"The output directory {directory} cannot be created ({error.strerror}): choose another."
        ) from error
    try:
        yield
    finally:
        unlink_lock(directory / name)
        lock.release()
        if is_new:
            with suppress(OSError):  # unless the run wrote something
                directory.rmdir()
