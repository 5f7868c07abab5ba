"""An adapter's run: its data, its options and its state."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from wgpu_lora.data import TokenizedData
from wgpu_lora.data.row_counts import SKIPPED, skipped_rows
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Evaluating, Events
from wgpu_lora.files.json_files import parse_object, to_json
from wgpu_lora.files.paths import working_folder
from wgpu_lora.formats.model_cards import CARD
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.train.lr_schedule import LR_SCHEDULES, learning_rate, warmup_steps
from wgpu_lora.train.options.training_arguments import CHANGEABLE_ON_RESUME, LENGTH_OPTIONS, TrainingArguments
from wgpu_lora.train.run import run_checkpoint, training_log
from wgpu_lora.train.run.adapter_init import FrozenAdapter
from wgpu_lora.train.run.checkpoint_store import PLAIN_FILES, CheckpointStore
from wgpu_lora.train.run.model_card import card
from wgpu_lora.train.run.records import Data, HeldOut, Memory, RunRecord
from wgpu_lora.train.run.resume import (
    UNTIMED_STEPS,
    check_output_free,
    no_checkpoint_error,
    option_changed_error,
    set_length,
)
from wgpu_lora.train.run.run_checkpoint import BEST, EPOCH, PHASE, Trainable, origin_of
from wgpu_lora.train.run.run_outcome import end_warnings, start_warnings
from wgpu_lora.train.run.run_state import SCHEMA, RunState, read_state
from wgpu_lora.train.run.training_log import Log
from wgpu_lora.train.session.data_stream import DataStream, heldout_options
from wgpu_lora.train.session.live_teachers import LiveTeacher
from wgpu_lora.train.session.rollout_stream import Phase, RolloutStream, stream_of
from wgpu_lora.train.session.rollouts import Rollouts
from wgpu_lora.train.session.session import Session, heldout_loss, precompute

LOGGING_STEPS, SHORT = 10, 100  # runs of at most SHORT steps log every step


class Tracking:
    """Reports of a run in training; by default none (`run_tracking` has those of recorded runs)."""

    def start(self) -> None:
        """The run's adapter is loaded, and its directory is locked for it."""

    def hardware(self) -> dict[str, float]:
        """The status of the hardware since the last call, by keys of the log."""
        return {}

    def log(self, line: Mapping[str, float]) -> None:
        """A line of log.jsonl."""

    def finish(self, record: RunRecord) -> None:
        """The run has ended, and its results are written."""


@dataclass
class AdapterRun:
    """The run of one adapter, in slot `slot` of a session, and its directory. A single run is a pipeline of one.

    name: in a pipeline; None for a single run.
    notes: on chosen options and resuming, for the user.
    """

    slot: int
    args: TrainingArguments
    trainable: Trainable
    stream: DataStream
    heldout: TokenizedData | None
    base_digest: str
    config_digest: str
    name: str | None = None
    notes: tuple[str, ...] = ()
    reference: FrozenAdapter | None = None  # that the objective compares the adapter with, instead of the base alone
    teacher: LiveTeacher | None = None
    teacher_digest: str | None = None  # of the live one, or of its cache
    teacher_sha256: str | None = None  # of the live one's weights, once loaded
    storage: CheckpointStore = PLAIN_FILES
    rollouts: Rollouts | None = None  # if the objective samples completions
    state: RunState = field(default_factory=RunState)
    resumed_from: Path | None = None
    weights_sha256: str | None = None  # of the base, once loaded
    log: Log = field(init=False, repr=False, compare=False)  # once the run has started
    tracking: Tracking = field(default_factory=Tracking, repr=False, compare=False)  # while its job runs
    resumed_identity: dict[str, Any] = field(default_factory=dict)  # of the checkpoint that it continues

    @property
    def adapter_name(self) -> str:
        """The name of a pipeline's adapter."""
        assert self.name is not None, "a single run has no name"
        return self.name

    @property
    def directory(self) -> Path:
        return self.args.directory

    def logs(self, step: int, heldout: bool) -> bool:
        """Whether a step is logged; those with a held-out loss and the last of a planned number always are."""
        interval = self.args.logging_steps or (1 if self.state.total_steps <= SHORT else LOGGING_STEPS)
        last = not self.args.target_seconds and step >= self.state.total_steps  # else `Progress.close` logs it
        return heldout or step % interval == 0 or last

    def identity(self) -> dict[str, Any]:
        """The fields that must match when the run is resumed, the planned length, and the held-out rows."""
        options = {
            k: v for k, v in self.args.as_dict().items() if k not in CHANGEABLE_ON_RESUME and k != "init_adapter"
        }
        base = {"base": self.base_digest, "config": self.config_digest, "weights": self.weights_sha256}
        reference = {"reference": self.reference.digest} if self.reference else {}
        teacher = {"teacher": self.teacher_digest} if self.teacher_digest else {}
        teacher |= {"teacher_weights": self.teacher_sha256} if self.teacher_sha256 else {}
        heldout = {"heldout": self.heldout_stream.rows_digest()} if self.heldout else {}
        return {"options": options, "data": self.stream.rows_digest(), **heldout, **base, **reference, **teacher}

    # -- beginning -------------------------------------------------------------------------------------------------

    def prepare_directory(self) -> None:
        """Create or check the output directory; with --resume, find the checkpoint to continue from.

        Raises:
            UserError: the directory has another run, or is not writable, or there is nothing to resume.
        """
        directory = self.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"The output directory {directory} cannot be created ({error.strerror}): choose another "
                f"{flag('output')}."
            ) from error
        if not os.access(directory, os.W_OK):
            raise UserError(f"The output directory {directory} is not writable: choose another {flag('output')}.")
        run_checkpoint.remove_run_leftovers(directory)
        if self.args.resume:
            self._find_checkpoint()
        else:
            check_output_free(directory, self.storage, self.args.overwrite)
            if self.args.overwrite:
                run_checkpoint.remove_run(directory)
            if self.storage is PLAIN_FILES:
                options = hashlib.sha256(to_json(self.identity()["options"], sort_keys=True).encode()).hexdigest()
                text = to_json({"id": secrets.token_hex(16), "options_sha256": options}) + "\n"
                self.storage.write(directory / run_checkpoint.ORIGIN, text.encode())
        accounts = [data.account for data in (self.stream.prepared, self.heldout) if data]
        self.storage.write(directory / SKIPPED, skipped_rows(accounts))

    def _find_checkpoint(self) -> None:
        self.resumed_from = run_checkpoint.latest_checkpoint(self.directory, self.storage)
        if self.resumed_from is None:
            raise no_checkpoint_error(self.directory)
        state, before = run_checkpoint.check(self.resumed_from, self.storage)
        self.state = self._with_own_losses(state, before)
        now = self.identity()
        old_options = TrainingArguments().as_dict() | before["options"]  # an older version may lack some
        for name, value in now["options"].items():
            if name not in LENGTH_OPTIONS and old_options[name] != value:
                raise option_changed_error(name, old_options[name], value)
        model = self.args.model
        if before["data"] != now["data"]:
            raise UserError(
                f"The rows of {self.stream.prepared.path} have changed since the run in {self.directory} started, and "
                f"{flag('resume')} needs the same rows: restore them, or train on the new ones in another directory, "
                f"starting from this adapter with {setting('init_adapter', str(self.directory))}."
            )
        for name, label in (("base", "base model"), ("config", "configuration")):
            if before[name] != now[name]:
                raise UserError(
                    f"The {label} of {model} has changed since the run in {self.directory} started: restore it, or "
                    "start a new run."
                )
        if before.get("reference") != now.get("reference"):
            raise UserError(
                f"The reference adapter of the run in {self.directory} has changed since it started: restore it, or "
                "start a new run."
            )
        if before.get("teacher") != now.get("teacher"):
            raise self._other_teacher()
        set_length(self.state, before["options"], self.stream, self.resumed_from, self.storage)
        self.resumed_identity = before
        run_checkpoint.remove_old(self.directory / run_checkpoint.STEPS, self.args.save_total_limit, self.storage)

    def _with_own_losses(self, state: RunState, identity: Mapping[str, Any]) -> RunState:
        """A checkpoint's state; if it has held-out losses of other rows, without them, so that the next one is best."""
        if not self.heldout or identity.get("heldout") in (None, self.identity()["heldout"]):
            return state
        return replace(state, first_eval_loss=None, best_eval_loss=None, best_step=0, last_eval_loss=None)

    def _other_teacher(self) -> UserError:
        return UserError(
            f"The teacher of the run in {self.directory} has changed since it started: restore it, or start a new run."
        )

    def place(self, session: Session) -> None:
        """Load the initial or resumed adapter onto the device.

        Raises:
            UserError: the checkpoint is damaged, or the base model's weights have changed.
        """
        self.weights_sha256 = session.model.weights_sha256
        self.teacher_sha256 = session.teachers.weights_sha256(self.slot)
        if self.reference:
            session.place_reference(self.slot, self.reference.matrices)
        if self.resumed_from:
            if self.resumed_identity["weights"] != self.weights_sha256:
                raise UserError(
                    f"The weights of {session.model.name} have changed since the run in {self.directory} started: "
                    "restore them, or start a new run."
                )
            if self.resumed_identity.get("teacher_weights") != self.teacher_sha256:
                raise self._other_teacher()
            run_checkpoint.restore(self.resumed_from, session, self.slot, self.trainable, self.storage)
            self._restore_completions(self.resumed_from)
        else:
            self.place_initial(session)
            self.state.total_steps = self.stream.total_steps()
            if self.args.target_seconds:
                self.state.total_steps = max(self.state.total_steps, UNTIMED_STEPS)
        resumed = self.state.step if self.resumed_from else None
        logged = resumed - bool(self.state.postponed) if resumed is not None else None
        self.log = Log(self.directory / training_log.LOG, logged)
        if self.rollouts and self.storage is PLAIN_FILES:
            samples = Log(self.directory / training_log.COMPLETIONS, resumed, training_log.completion_entry)
            self.rollouts.on_sample = lambda sample: samples.write(
                {**sample, "step": self.state.step + (not sample["heldout"])}
            )
            self.rollouts.trainer_state = self._trainer_state
        self.tracking.start()

    def _trainer_state(self) -> dict[str, Any]:
        """Fields of transformers' TrainerState."""
        state, args = self.state, self.args
        epoch = state.epoch + state.index / max(1, len(self.stream.epoch(state.epoch)))
        planned = {"max_steps": state.total_steps, "num_train_epochs": args.num_train_epochs}
        return {"global_step": state.step, "epoch": epoch, **planned}

    def _restore_completions(self, directory: Path) -> None:
        """Read the completions that the next step trains on, if it is amid a phase. Raises UserError if they are
        damaged."""
        stream = self.stream
        if not isinstance(stream, RolloutStream):
            return
        stream.phase = None
        if not self.state.index % stream.phase_steps:
            return
        try:
            phase = Phase.read(parse_object(self.storage.read(directory / PHASE, None), PHASE, 1 << 30, 1 << 26))
            if not phase.epoch == self.state.epoch or not 0 < self.state.index - phase.start < stream.phase_steps:
                raise ValueError("its completions are of other steps")
            if any(completion.sample >= len(stream.prepared.samples) for completion in phase.completions):
                raise ValueError("its completions are of other prompts")
        except (UserError, ValueError, OSError) as error:
            raise run_checkpoint.damaged_checkpoint_error(
                directory, f"{PHASE} does not match this run: {str(error).removesuffix('.')}", self.storage
            ) from None
        stream.phase = phase

    def precompute(self, session: Session, events: Events = SILENT) -> None:
        """Compute the reference of all samples, if the objective does so before training (`Objective.precomputes`)."""
        if not self.stream.objective.precomputes:
            return
        streams = [self.stream, *([self.heldout_stream] if self.heldout else [])]
        for stream in streams:
            precompute(session, stream, self.slot, events, self.name)

    def place_initial(self, session: Session) -> None:
        self.trainable.place_initial(session, self.slot)

    def _place_first(self, session: Session) -> None:
        """Load what the run started from, even if resumed; the optimizer's state becomes zero."""
        self.trainable.load_initial(session, self.slot, self.resumed_from, self.storage)
        session.optimizer.state.write(session.device, self.slot, {})

    @cached_property
    def heldout_stream(self) -> DataStream:
        assert self.heldout
        return stream_of(self.heldout, heldout_options(self.args))

    # -- during ----------------------------------------------------------------------------------------------------

    def learning_rate(self) -> float:
        """The learning rate of the next step of a run without --target-seconds, whose rate its clock knows."""
        args, start = self.args, self.state.schedule_start
        step, total = self.state.step - start, self.state.total_steps - start
        kind, minimum, warmup = args.lr_scheduler_type, args.lr_scheduler_min, self.warmup(total)
        return learning_rate(kind, args.rate, step, total, warmup, minimum)

    def before_step(self, session: Session) -> None:
        """Called before the passes of the next step, and before a held-out loss."""
        state, last = self.state, self.trainable.last_steps(self.state.total_steps)
        ending = last > 0 and state.step >= state.total_steps - last
        if self.args.target_seconds:  # the total is an estimate, whatever it becomes once the last steps have begun
            guessed = not state.calibrated and state.step < state.total_steps
            ending = state.ending = state.ending or (ending and not guessed)
        self.trainable.before_step(session, ending)

    def warmup(self, total: int) -> int:
        """Warm-up steps out of `total`."""
        args = self.args
        rises = LR_SCHEDULES[args.lr_scheduler_type].warms_up
        return warmup_steps(total, args.warmup_ratio, args.warmup_steps) if rises else 0

    def save(self, session: Session, events: Events = SILENT) -> None:
        """Save a checkpoint of this step; keeps the newest --save-total-limit of the earlier ones."""
        steps = self.directory / run_checkpoint.STEPS
        final = steps / f"step-{self.state.step}"
        if not self.storage.has(final):  # else this step was saved, or resumed from
            self.write_checkpoint(session, final)
            events.saved(self.storage.disk_path(final), self.state.step, None)
        run_checkpoint.remove_old(steps, self.args.save_total_limit, self.storage)

    def save_epoch(self, session: Session, number: int) -> None:
        """Save a pipeline's adapter after an epoch; keeps the newest --save-total-limit of these."""
        self.write_checkpoint(session, self.directory / EPOCH.format(number))
        run_checkpoint.remove_old_epochs(self.directory, self.args.save_total_limit, self.storage)

    def write_checkpoint(self, session: Session, final: Path) -> None:
        """Write the state to a directory. Raises OSError if the disk refuses; `final` is then unchanged."""
        self.storage.write_directory(final, self.checkpoint_files(session))

    def checkpoint_files(self, session: Session) -> dict[str, bytes]:
        facts = {"identity": self.identity(), "metadata": self.metadata()}
        extra_files, stream, state = dict[str, bytes](), self.stream, self.state
        phase = stream.phase if isinstance(stream, RolloutStream) and state.index % stream.phase_steps else None
        if phase:  # its other steps train on what an earlier adapter sampled
            extra_files[PHASE] = to_json(phase.as_dict()).encode()
        return run_checkpoint.checkpoint_files(session, self.slot, self.trainable, state, facts, extra_files)

    def fall_back(self, session: Session) -> None:
        """Load the newest checkpoint from before the update that ruined the adapter, else the initial adapter.

        A checkpoint of an earlier step is known to be good, since the loss of the step after it was finite. Later ones
        contain the ruined adapter and are removed, so that a resumed run does not find them.
        """
        root, storage = self.directory, self.storage
        last = [root / run_checkpoint.LAST] if storage.has(root / run_checkpoint.LAST) else []
        steps = [
            directory for _, directory in run_checkpoint.list_checkpoints(root / run_checkpoint.STEPS, storage=storage)
        ]
        directories = [*last, *run_checkpoint.results_of(root, storage), *steps]
        states = [
            (self._with_own_losses(*read_state(directory, storage)), directory)
            for directory in directories
            if not run_checkpoint.checkpoint_damage(directory, storage)
        ]
        sound = [(state, directory) for state, directory in states if state.step < self.state.step]
        if sound:
            self.state, directory = max(sound, key=lambda pair: pair[0].step)
            run_checkpoint.restore(directory, session, self.slot, self.trainable, storage)
            self._restore_completions(directory)
        else:
            first = self.state.first_eval_loss
            self.state = RunState(
                total_steps=self.state.total_steps,
                tiles=self.state.tiles,
                unrounded_eval_loss=self.state.unrounded_eval_loss,
                first_eval_loss=first,
                last_eval_loss=first,
            )
            self._place_first(session)
        for state, directory in states:
            if state.step > self.state.step and directory.name != run_checkpoint.LAST:  # the pipeline replaces that one
                storage.remove(directory)

    def measure_heldout(self, session: Session, events: Events) -> dict[str, float]:
        """Measure the held-out `eval_loss` and metrics, {} if not finite; `SlotProgress.save_best` saves the best.

        Before the first step, the loss is only a baseline.
        """
        if not self.heldout or not (session.heldout or self.rollouts):
            return {}
        stream = self.heldout_stream
        self.before_step(session)
        at = Evaluating(0, len(self.heldout.rows), step=self.state.step, adapter=self.name)

        def watch(rows: int) -> None:
            events.evaluating(replace(at, rows=rows))

        if self.rollouts:
            assert isinstance(stream, RolloutStream)
            result = self.rollouts.heldout(session, stream, self.slot, watch)
        else:
            result = heldout_loss(session, stream, self.slot, watch)
        loss = result["loss"]
        if not all(map(math.isfinite, result.values())):
            return {}
        state = self.state
        state.last_eval_loss = loss
        if not state.step:
            state.first_eval_loss = loss
        elif state.best_eval_loss is None or loss < state.best_eval_loss:
            state.best_eval_loss, state.best_step = loss, state.step
        events.evaluating(replace(at, rows=at.total, loss=loss))
        return {f"eval_{name}": value for name, value in result.items()}

    @cached_property
    def start_warnings(self) -> list[str]:
        return start_warnings(self.args, self.stream, self.heldout)

    def log_lines(self) -> list[dict[str, Any]]:
        """The lines of the log so far."""
        return training_log.read_log(self.log.path) if self.log.path.is_file() else []

    def _end_warnings(self) -> list[str]:
        return end_warnings(self.state, self.log_lines(), self.rollouts is not None, self.stream.prepared, self.heldout)

    # -- end -------------------------------------------------------------------------------------------------------

    def finish(self, session: Session, stop_reason: str, stop_signal: str | None = None) -> RunRecord:
        """Write the final adapter, run.json and the model card.

        stop_signal: name of the signal that interrupted the run, if any.
        """
        companions = session.model.tokenizer_files
        self.storage.write_tokenizer(self.directory / BEST, companions)
        companions = companions if self.storage.write_tokenizer(self.directory, companions) else {}
        for name, data in self.trainable.checkpoint_files(session, self.slot, companions).items():
            self.storage.write(self.directory / name, data)
        self.trainable.write(session, self.slot, self.directory)
        record = self.record(session, stop_reason, stop_signal)
        self.storage.write(self.directory / CARD, card(record, session.model.config.AUTO_CLASS).encode())
        self.storage.finish(self.directory)
        record.write(self.directory)
        self.tracking.finish(record)
        return record

    def metadata(self) -> dict[str, Any]:
        """The contents of metadata.json: facts about a checkpoint for people and tools."""
        state = self.state
        return {
            "schema": SCHEMA,
            "slot": self.slot,
            "name": self.name,
            "epoch": state.epoch,  # of the next step, which is the number of completed ones
            "step": state.step,
            "tokens": state.tokens,
            "losses": {"train": state.last_loss, "held_out": state.last_eval_loss, "best": state.best_eval_loss},
            "options": self.args.as_dict(),
            "data": {"prompt_format": self.stream.prepared.prompt_format},
            **({"run": origin} if (origin := origin_of(self.directory)) else {}),
            "directory": str(working_folder()),  # base of the relative paths in the options
            "digests": {
                "rows": self.stream.rows_digest(),
                "data": self.stream.prepared.digest,
                "base": self.base_digest,
                "weights": self.weights_sha256,
            },
        }

    def record(self, session: Session, stop_reason: str, stop_signal: str | None) -> RunRecord:
        """The contents of run.json for a run that has ended; its adapter must already be written."""
        prepared, state = self.stream.prepared, replace(self.state)
        if self.args.target_seconds and not state.calibrated:
            state = replace(state, total_steps=state.step)  # it ended before the number of steps was measured
        return RunRecord(
            stop_reason=stop_reason,
            signal=stop_signal,
            damaged_log_lines=self.log.damaged,
            options=self.args,
            state=state,
            data=Data(prepared.path, prepared.digest, prepared.summary(), prepared.prompt_format),
            eval_data=HeldOut(self.heldout.path, self.heldout.digest) if self.heldout else None,
            base_digest=self.base_digest,
            base_sha256=self.weights_sha256,
            init_adapter_sha256=training_log.adapter_digest(self.args.init_adapter, self.storage)
            if self.args.init_adapter
            else None,
            adapter_sha256=self.storage.digest(self.directory / self.trainable.files[0]),
            trainable_parameters=session.trained.trainable(self.slot, session.model.config),
            memory=memory_of(session),
            environment=training_log.environment(session.device),
            warnings=self.start_warnings + self._end_warnings(),
        )


def memory_of(session: Session) -> Memory:
    """Planned memory, and the peak that was allocated."""
    plan = session.memory()
    return Memory(plan.groups, plan.peak, session.device.peak_allocated, plan.host)
