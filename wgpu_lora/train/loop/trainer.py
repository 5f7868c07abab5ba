"""The training loop: choose slots, upload, replay, update, and end each slot with a reason."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from wgpu_lora.data import pack
from wgpu_lora.events import Events
from wgpu_lora.processes.signals import Stopped, on_end_signal, stoppable
from wgpu_lora.train.data_parallel.leader import DataParallelLeader
from wgpu_lora.train.loop.slot_policy import Policy, Synchronized, policy_state
from wgpu_lora.train.loop.slot_progress import CHECKPOINT, SlotProgress
from wgpu_lora.train.objectives.objective import Group
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.run.disk_space import FULL, release
from wgpu_lora.train.run.multi_adapter_run import MultiAdapterRun
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.train.run.stop_reasons import FINISHED, RESUMABLE, Requests
from wgpu_lora.train.session.session import Session

T = TypeVar("T")
SAVING_SHARE = 0.01  # of the time


@dataclass
class Trainer:
    """Trains every slot of a session until it ends, and saves checkpoints.

    Attributes:
        step: steps of the session, by any slot.
        signal: name of the signal that interrupted training.
        records: of the runs that have ended, by slot.
        sharing: replicas that compute parts of the steps of a single run.
        shared: the state and the record of several adapters, whose checkpoints are saved together.
        requests: which slots to end while the others go on.
    """

    session: Session
    runs: Sequence[AdapterRun]
    events: Events = field(default_factory=Events)
    policy: Policy = field(default_factory=Synchronized)
    step: int = 0
    signal: str | None = None
    records: dict[int, RunRecord] = field(default_factory=dict)
    sharing: DataParallelLeader | None = None
    shared: MultiAdapterRun | None = None
    requests: Requests = field(default_factory=Requests)
    _stop: threading.Event = field(default_factory=threading.Event)
    _stopped_by_events: bool = False  # whether `events.step` stopped it
    _save_time: float = field(default_factory=time.monotonic)  # when, or when training began
    _full: OSError | None = None  # what was written when the disk was full, before the reserve was released

    def __post_init__(self) -> None:
        self.all = [SlotProgress(run, self.session, self.policy.eval_steps, events=self.events) for run in self.runs]
        if self.shared:
            self.step = self.shared.state.step

    def train(self) -> dict[int, RunRecord]:
        """Train to the end and write all results; returns `records`.

        Raises:
            UserError: the checkpoint to resume is damaged. OSError: writing failed; earlier checkpoints are intact, and
                if the disk is full, the last step is saved in the space that was reserved.
        """
        with self._signals():  # to the end, so that a second Ctrl-C does not prevent saving
            self._end_earlier()
            self._measure_start()
            for progress in self.all:
                if not progress.ended and progress.resume_step():
                    self._after_step(progress)
            while live := self._live_slots():
                if self._full:
                    self.save()
                    raise self._full
                if self._stop.is_set():
                    self._retire(
                        dict.fromkeys(
                            (p.run.slot for p in live), "callback" if self._stopped_by_events else "interrupt"
                        )
                    )
                else:
                    self._train_step(live)
            return self.records

    def _end_earlier(self) -> None:
        """End slots that had ended before the run was interrupted."""
        ended = self.shared.state.ended if self.shared else {}
        for progress in self.all:
            if ended and (reason := ended.get(progress.run.adapter_name)):
                progress.ended = reason
                self.records[progress.run.slot] = progress.run.finish(self.session, reason)
                self.events.retired(reason, progress.run.name)

    def _measure_start(self) -> None:
        """Measure the initial held-out losses, the baseline for people and policies."""
        for progress in self.all:
            run, state = progress.run, progress.run.state
            evaluates = run.args.eval_on_start or self.policy.eval_steps
            new = run.heldout and not state.step and state.first_eval_loss is None and not progress.ended
            if evaluates and new:
                with suppress(Stopped), self._stoppable():  # it is measured when the run is resumed
                    self._write(partial(progress.measure_start, self.events))

    def _live_slots(self) -> list[SlotProgress]:
        """The slots with remaining steps; the other slots are ended."""
        reasons = {p.run.slot: p.reason_to_end() or self._end_request(p.run) for p in self.all if not p.ended}
        self._retire({slot: reason for slot, reason in reasons.items() if reason})
        return [p for p in self.all if not p.ended]

    def _end_request(self, run: AdapterRun) -> str | None:
        return "request" if self.requests.ending(run.name) else None

    def _train_step(self, live: list[SlotProgress]) -> None:
        """Take one optimizer step of the slots that the policy chooses; one that would diverge is not updated."""
        device, optimizer = self.session.device, self.session.optimizer
        slots = self.policy.choose([p.run for p in live])
        stepping = [p for p in live if p.run.slot in slots]
        begin = time.perf_counter()
        try:
            with self._stoppable():
                for progress in stepping:
                    progress.begin()
                if self.sharing:
                    self.sharing.accumulate(self.session, stepping[0].run, stepping[0].step)
                else:
                    self._accumulate(self._batches(stepping))
        except Stopped:  # the run ends before this step
            return
        updates = {p.run.slot: p.update() for p in stepping}
        reports = optimizer.apply(device, updates)
        seconds = time.perf_counter() - begin
        tokens = sum(p.trained_tokens for p in stepping)
        sampling = sum(sum(p.sampling_seconds.values()) for p in stepping)
        self.step += 1
        advanced = [progress for progress in stepping if reports[progress.run.slot].applied]
        for progress in advanced:  # all of them first, since held-out losses overwrite the step's totals
            slot = progress.run.slot
            share = progress.trained_tokens / tokens if tokens else 1 / len(stepping)
            training = {"training_seconds": (seconds - sampling) * share} if progress.run.rollouts else {}
            progress.advance(reports[slot], updates[slot], seconds * share)
            progress.note({**progress.sampling_seconds, **training})
            if self.sharing:
                progress.note(self.sharing.facts())
        for progress in advanced:
            self._after_step(progress)
        bad = [progress for progress in stepping if not reports[progress.run.slot].applied]
        reasons = {p.run.slot: "diverged" if reports[p.run.slot].diverged else "non-finite" for p in bad}
        for progress in bad:
            progress.write_pending()
            if reasons[progress.run.slot] == "non-finite" and not self._rows_are_finite(progress):
                progress.run.fall_back(self.session)
        self._retire(reasons)
        if self.save_due():
            with self.all[0].clock.timed_work(CHECKPOINT):
                self._write(self.save)
            self._save_time = time.monotonic()

    def save(self) -> None:
        """Save the checkpoints that the runs are resumed from."""
        if self.shared:
            ended = {p.run.adapter_name: p.ended for p in self.all if p.ended and p.ended not in RESUMABLE}
            self.shared.save(self.session, self.runs, self.step, policy_state(self.policy), ended, self.events)
        elif self.runs[0].state.step or self.interrupted:
            self.runs[0].save(self.session, self.events)

    def save_due(self) -> bool:
        """Whether to save after this step."""
        if self.shared:
            interval = self.runs[0].args.save_steps
            first_best = not self.shared.state.steps and any(run.state.best_step for run in self.runs)  # only best/ yet
            return first_best or self.overdue() or (bool(interval) and self.step % interval == 0)
        return self.all[0].checkpoint_due(self.overdue())

    def overdue(self) -> bool:
        """Whether a checkpoint is due by --save-minutes, and the last one took at most SAVING_SHARE of the time."""
        minutes, seconds = self.runs[0].args.save_minutes, self.runs[0].state.between_seconds.get(CHECKPOINT, 0.0)
        return bool(minutes) and time.monotonic() - self._save_time >= max(60 * minutes, seconds / SAVING_SHARE)

    def _write(self, write: Callable[[], T]) -> T:
        """Return `write()`. If the disk is full, the reserve is released for it, and the runs end after this step."""
        try:
            return write()
        except OSError as error:
            if error.errno not in FULL or not release(self.runs):
                raise
            self._full = error
            return write()

    def _rows_are_finite(self, progress: SlotProgress) -> bool:
        """Whether a slot's rows are at fault, not its weights: the previous step's rows still give finite gradients."""
        self._accumulate(self._packed(progress.previous_batches()))
        return self.session.optimizer.finite(self.session.device, progress.run.slot)

    def _accumulate(self, batches: list[list[Group]]) -> None:
        """Accumulate losses and gradients without an update."""
        self.session.begin()
        for groups in self.session.with_kl_estimate(batches):
            self.session.accumulate(groups)

    def _batches(self, stepping: list[SlotProgress]) -> list[list[Group]]:
        """The groups of a step: a run's own batches, or those of several slots packed together."""
        return self._packed([batch for progress in stepping for batch in progress.micro_batches()])

    def _packed(self, batches: list[list[Group]]) -> list[list[Group]]:
        if len(self.all) == 1:
            return batches
        groups = [group for batch in batches for group in batch]
        lengths = [group.tokens for group in groups]
        return [[groups[i] for i in bin] for bin in pack(lengths, range(len(lengths)), max(self.session.steps))]

    def _after_step(self, progress: SlotProgress) -> None:
        if progress.heldout_due():
            try:
                with self._stoppable():
                    progress.measure_heldout(self.events)
            except Stopped:
                progress.postpone()
                return
        result = self._write(progress.logged)
        self._write(progress.save_best)
        if self.events.step(result) is True:
            self._stopped_by_events = True
            self._stop.set()
        if progress.epoch_done and self.shared:  # a single run's checkpoints are saved by step
            self._write(partial(progress.run.save_epoch, self.session, progress.epoch_done))

    def _retire(self, reasons: dict[int, str]) -> None:
        """End slots: save checkpoints, then write the results."""
        ending = [p for p in self.all if p.run.slot in reasons]
        if not ending:
            return
        for progress in ending:
            progress.ended = reasons[progress.run.slot]
            if progress.ended == "target seconds":
                with self._stoppable():
                    self._write(partial(progress.close, self.events))
            if progress.ended in FINISHED and progress.run.rollouts and progress.run.rollouts.all_failed:
                progress.ended = "no rewards"
        self._write(self.save)
        for progress in ending:
            assert progress.ended
            interrupted = self.signal if progress.ended == "interrupt" else None
            finish = partial(progress.run.finish, self.session, progress.ended, interrupted)
            self.records[progress.run.slot] = self._write(finish)
            self.events.retired(progress.ended, progress.run.name)

    @property
    def interrupted(self) -> bool:
        """Whether anything other than `events.step` stopped training."""
        return self._stop.is_set() and not self._stopped_by_events

    def stop(self, signal_name: str | None = None) -> None:
        """End the runs before the device gets more work, as an interrupt does; the step that it is amid is left out."""
        self.signal = self.signal or signal_name
        self._stop.set()

    def _stoppable(self) -> AbstractContextManager[None]:
        return stoppable(lambda: self.interrupted)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with on_end_signal(lambda number: self.stop(signal.Signals(number).name)):
            yield
