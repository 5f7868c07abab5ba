"""A prepared run, read, checked and planned, and how it is executed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from filelock import Timeout
from safetensors import SafetensorError

from wgpu_lora.errors import StorageError, UserError, reason
from wgpu_lora.events import SILENT, Events, Passing
from wgpu_lora.gpu.choices import Choices
from wgpu_lora.gpu.tuner import Tuner, wanted
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.locks import check_output, lock_file
from wgpu_lora.names.naming import flag, setting
from wgpu_lora.share import budget_bytes, claim
from wgpu_lora.train import checkpoint, space
from wgpu_lora.train.following import following
from wgpu_lora.train.memory import Replan, check_memory, options_that_fit
from wgpu_lora.train.records import PipelineRecord, RunRecord
from wgpu_lora.train.requests import Requests
from wgpu_lora.train.session import Session
from wgpu_lora.train.slot import AdapterRun

LOCK = ".lock"
Record = TypeVar("Record", RunRecord, PipelineRecord)  # its result


@dataclass(repr=False)
class Job(Generic[Record]):
    """A session and the runs of its slots; nothing is allocated yet.

    requests: of other threads, while it trains.
    """

    session: Session
    runs: Sequence[AdapterRun]
    replan: Replan
    requests: Requests = field(default_factory=Requests, kw_only=True)
    _needed: int = field(default=0, init=False)  # bytes on the disk

    @property
    def run(self) -> AdapterRun:
        """The only run, or the first."""
        return self.runs[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(str(run.directory)) for run in self.runs)})"

    def directories(self) -> list[Path]:
        """The directories that the job writes to and locks."""
        return [run.directory for run in self.runs]

    def record_directory(self) -> Path:
        """Where the record of the job is written."""
        return self.run.directory

    def check_memory(self) -> None:
        """Raise UserError if the device has too little memory, naming options that would make the run fit."""
        args = self.run.args
        budget = budget_bytes(self.session.device.info, args.budget())
        plan = self.session.memory()
        check_memory(plan.guarded, plan.groups["base"], budget, args, self.replan)

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
            what = f"finetune {self.directories()[-1]}"
            seconds = args.wait_seconds()
            stack.enter_context(claim(self.session.device, need, what, budget, seconds, events, self._beside))
            events = Passing(events, stack.enter_context(following(self.runs, info, self.record_directory(), events)))
            try:
                for run in self.runs:
                    run.prepare_directory()
                device = self.session.device
                self.begin(events)
                device.peak_allocated = device.allocated  # of this run only
                self.session.allocate(events, self.choose_tilings(events))
                return self._train(events)
            finally:
                self.session.close()

    def _beside(self, free: int) -> str:
        """Options that would make the run fit into the free memory."""
        found = options_that_fit(free, self.run.args, self.replan)
        return f"run with {found}" if found else ""

    def tuner(self) -> Tuner | None:
        """The tuner of kernel tilings; None if the run is resumed or uses the defaults."""
        args = self.run.args
        return Tuner(self.session.device, retune=args.retune) if wanted(args.tune) and not args.resume else None

    def choose_tilings(self, events: Events) -> Choices:
        """The tilings of the run's kernels, timed unless they are known. Raises UserError if a kernel has none."""
        tuner = self.tuner()
        with verdicts_of(self.session.device).telling(events):
            choices = tuner.tune(self.session.programs(), events) if tuner else self.run.state.tiles
        for run in self.runs:
            run.state.tiles = choices
        return choices

    def _train(self, events: Events) -> Record:
        try:
            for run in self.runs:
                run.place(self.session)
            self._needed = space.reserve(self.session, self.runs)
            for run in self.runs:
                run.precompute(self.session, events)
            self.session.release_references()
            return self.finish(events)
        except (OSError, SafetensorError) as error:  # safetensors raises its own error if the disk is full
            raise self._unwritten(error) from error
        finally:
            space.release(self.runs)

    def _unwritten(self, error: Exception) -> StorageError:
        """The error for a file that could not be written: what is there, and how to go on."""
        where = getattr(error, "filename", None) or self.directories()[-1]
        full = getattr(error, "errno", None) in space.FULL and self._needed
        mend = f"make room for {self._needed + space.GROWTH:,} bytes there" if full else "fix that"
        state = self.newest_state()
        kept = f"the newest complete state is {state}" if state else "there is no complete state yet"
        go_on = f"go on with {setting('resume', True)}" if state else "start again"
        return StorageError(f"Writing to {where} failed ({reason(error)}), and {kept}: {mend} and {go_on}.")

    def newest_state(self) -> Path | None:
        """What the job would be resumed from, as it is on the disk."""
        found = checkpoint.newest(self.run.directory, self.run.storage)
        return found and self.run.storage.place(found)

    def begin(self, events: Events) -> None:
        """Called before the device's memory is allocated."""

    def finish(self, events: Events) -> Record:
        """Train and write the results."""
        raise NotImplementedError


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory against other processes; it is created if missing, and removed again if it stays empty."""
    check_output(directory, flag("output"))
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock_file(directory / LOCK).lock
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
        lock.release()
        if made and {p.name for p in directory.iterdir()} <= {LOCK}:
            with suppress(OSError):  # the run ended before it wrote anything
                (directory / LOCK).unlink(missing_ok=True)
                directory.rmdir()
