"""One adapter's run in its directory: how it starts, what it saves, and how it ends."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from wgpu_lora.data.account import SKIPPED, skipped_rows
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Evaluating, Events
from wgpu_lora.formats.cards import CARD
from wgpu_lora.names.naming import flag, setting
from wgpu_lora.strict_json import to_json
from wgpu_lora.train import checkpoint, output
from wgpu_lora.train.card import card
from wgpu_lora.train.checkpoint import BEST, EPOCH
from wgpu_lora.train.facts import metadata, record_of
from wgpu_lora.train.heldout import heldout_loss
from wgpu_lora.train.options.arguments import PLAN, TrainingArguments
from wgpu_lora.train.output import Log
from wgpu_lora.train.precompute import precompute
from wgpu_lora.train.records import RunRecord
from wgpu_lora.train.resume import UNTIMED_STEPS, differs, nothing_in, refuse_used, set_length
from wgpu_lora.train.run import Run
from wgpu_lora.train.schedule import LR_SCHEDULES, learning_rate, warmup_steps
from wgpu_lora.train.session import Session
from wgpu_lora.train.state import RunState, read_state
from wgpu_lora.train.storage import PLAIN
from wgpu_lora.train.stream import DataStream, heldout_options


@dataclass
class AdapterRun(Run):
    """A run in a session, and its directory."""

    _began_with: str | None = None  # weights_sha256 of the resumed run
    _taught_by: str | None = None  # teacher_sha256 of the resumed run

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
        checkpoint.sweep_run(directory)
        if self.args.resume:
            self._find_checkpoint()
        else:
            refuse_used(directory, self.storage, self.args.overwrite)
            if self.args.overwrite:
                checkpoint.remove_run(directory)
            if self.storage is PLAIN:
                options = hashlib.sha256(to_json(self.identity()["options"], sort_keys=True).encode()).hexdigest()
                said = to_json({"id": secrets.token_hex(16), "options_sha256": options}) + "\n"
                self.storage.write(directory / checkpoint.ORIGIN, said.encode())
        accounts = [data.account for data in (self.stream.prepared, self.heldout) if data]
        self.storage.write(directory / SKIPPED, skipped_rows(accounts))

    def _find_checkpoint(self) -> None:
        self.resumed_from = checkpoint.newest(self.directory, self.storage)
        if self.resumed_from is None:
            raise nothing_in(self.directory)
        self.state, before = checkpoint.check(self.resumed_from, self.storage)
        now = self.identity()
        began = TrainingArguments().as_dict() | before["options"]  # an older version may lack some
        for name, value in now["options"].items():
            if name not in PLAN and began[name] != value:
                raise differs(name, began[name], value)
        model = self.args.model
        if before["data"] != now["data"]:
            raise UserError(
                f"The rows of {self.stream.prepared.path} have changed since the run in {self.directory} started, and "
                f"{flag('resume')} needs the same rows: restore them, or train on the new ones in another directory, "
                f"starting from this adapter with {setting('init_adapter', str(self.directory))}."
            )
        for name, what in (("base", "base model"), ("config", "configuration")):
            if before[name] != now[name]:
                raise UserError(
                    f"The {what} of {model} has changed since the run in {self.directory} started: restore it, or "
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
        self._began_with, self._taught_by = before["weights"], before.get("teacher_weights")
        checkpoint.remove_old(self.directory / checkpoint.STEPS, self.args.save_total_limit, self.storage)

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
            if self._began_with != self.weights_sha256:
                raise UserError(
                    f"The weights of {session.model.name} have changed since the run in {self.directory} started: "
                    "restore them, or start a new run."
                )
            if self._taught_by != self.teacher_sha256:
                raise self._other_teacher()
            checkpoint.restore(self.resumed_from, session, self.slot, self.subject, self.storage)
        else:
            self.place_initial(session)
            self.state.total_steps = self.stream.total_steps()
            if self.args.target_seconds:
                self.state.total_steps = max(self.state.total_steps, UNTIMED_STEPS)
        self.log = Log(self.directory / output.LOG, self.state.step if self.resumed_from else None)
        self.follower.placed()

    def precompute(self, session: Session, events: Events = SILENT) -> None:
        """Compute the reference of all samples, if the objective does so before training (`Objective.precomputes`)."""
        if not self.stream.objective.precomputes:
            return
        streams = [self.stream, *([self.heldout_stream] if self.heldout else [])]
        for stream in streams:
            precompute(session, stream, self.slot, events, self.name)

    def place_initial(self, session: Session) -> None:
        self.subject.place_initial(session, self.slot)

    def _place_first(self, session: Session) -> None:
        """Load what the run started from, even if resumed; the optimizer's state becomes zero."""
        self.subject.place_first(session, self.slot, self.resumed_from, self.storage)
        session.optimizer.state.write(session.device, self.slot, {})

    @cached_property
    def heldout_stream(self) -> DataStream:
        assert self.heldout
        return DataStream(self.heldout, heldout_options(self.args))

    # -- during ----------------------------------------------------------------------------------------------------

    def rate(self) -> float:
        """The learning rate of the next step of a run without --target-seconds, whose rate its clock knows."""
        args, start = self.args, self.state.schedule_start
        step, total = self.state.step - start, self.state.total_steps - start
        kind, least, warmup = args.lr_scheduler_type, args.lr_scheduler_min, self.warmup(total)
        return learning_rate(kind, args.rate, step, total, warmup, least)

    def before_step(self, session: Session) -> None:
        """Called before the passes of the next step, and before a held-out loss."""
        state, last = self.state, self.subject.last_steps(self.state.total_steps)
        ending = last > 0 and state.step >= state.total_steps - last
        if self.args.target_seconds:  # the total is an estimate, whatever it becomes once the last steps have begun
            guessed = not state.calibrated and state.step < state.total_steps
            ending = state.ending = state.ending or (ending and not guessed)
        self.subject.before_step(session, ending)

    def warmup(self, total: int) -> int:
        """Warm-up steps out of `total`."""
        args = self.args
        rises = LR_SCHEDULES[args.lr_scheduler_type].warms_up
        return warmup_steps(total, args.warmup_ratio, args.warmup_steps) if rises else 0

    def save(self, session: Session, events: Events = SILENT) -> None:
        """Save a checkpoint of this step; keeps the newest --save-total-limit of the earlier ones."""
        steps = self.directory / checkpoint.STEPS
        final = steps / f"step-{self.state.step}"
        if not self.storage.has(final):  # else this step was saved, or resumed from
            self.write_checkpoint(session, final)
            events.saved(self.storage.place(final), self.state.step, None)
        checkpoint.remove_old(steps, self.args.save_total_limit, self.storage)

    def save_epoch(self, session: Session, number: int) -> None:
        """Save a pipeline's adapter after an epoch; keeps the newest --save-total-limit of these."""
        self.write_checkpoint(session, self.directory / EPOCH.format(number))
        checkpoint.remove_old_epochs(self.directory, self.args.save_total_limit, self.storage)

    def write_checkpoint(self, session: Session, final: Path) -> None:
        """Write the state to a directory. Raises OSError if the disk refuses; `final` is then unchanged."""
        self.storage.write_directory(final, self.checkpoint_files(session))

    def checkpoint_files(self, session: Session) -> dict[str, bytes]:
        facts = {"identity": self.identity(), "metadata": metadata(self)}
        return checkpoint.checkpoint_files(session, self.slot, self.subject, self.state, facts)

    def fall_back(self, session: Session) -> None:
        """Load the newest checkpoint from before the update that ruined the adapter, else the initial adapter.

        A checkpoint of an earlier step is known to be good, since the loss of the step after it was finite. Later ones
        contain the ruined adapter and are removed, so that a resumed run does not find them.
        """
        root, storage = self.directory, self.storage
        last = [root / checkpoint.LAST] if storage.has(root / checkpoint.LAST) else []
        steps = [place for _, place in checkpoint.found(root / checkpoint.STEPS, storage=storage)]
        places = [*last, *checkpoint.results_of(root, storage), *steps]
        kept = [(read_state(place, storage)[0], place) for place in places if not checkpoint.fault(place, storage)]
        sound = [(state, place) for state, place in kept if state.step < self.state.step]
        if sound:
            self.state, place = max(sound, key=lambda found: found[0].step)
            checkpoint.restore(place, session, self.slot, self.subject, storage)
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
        for state, place in kept:
            if state.step > self.state.step and place.name != checkpoint.LAST:  # the pipeline replaces that one
                storage.remove(place)

    def measure_heldout(self, session: Session, events: Events) -> dict[str, float]:
        """Measure the held-out `eval_loss` and metrics, {} if not finite; `Progress.save_best` saves the best adapter.

        Before the first step, the loss is only a baseline.
        """
        if not self.heldout or not session.heldout:
            return {}
        stream = self.heldout_stream
        self.before_step(session)
        at = Evaluating(0, len(self.heldout.rows), step=self.state.step, adapter=self.name)
        found = heldout_loss(session, stream, self.slot, lambda rows: events.evaluating(replace(at, rows=rows)))
        loss = found["loss"]
        if not all(map(math.isfinite, found.values())):
            return {}
        state = self.state
        state.last_eval_loss = loss
        if not state.step:
            state.first_eval_loss = loss
        elif state.best_eval_loss is None or loss < state.best_eval_loss:
            state.best_eval_loss, state.best_step = loss, state.step
        events.evaluating(replace(at, rows=at.total, loss=loss))
        return {f"eval_{name}": value for name, value in found.items()}

    # -- end -------------------------------------------------------------------------------------------------------

    def finish(self, session: Session, stop_reason: str, stop_signal: str | None = None) -> RunRecord:
        """Write the final adapter, run.json and the model card.

        stop_signal: name of the signal that interrupted the run, if any.
        """
        for name, data in self.subject.saved(session, self.slot).items():
            self.storage.write(self.directory / name, data)
        self.subject.write(session, self.slot, self.directory)
        for place in (self.directory, self.directory / BEST):
            self.storage.write_tokenizer(place, session.model.path, session.model.tokenizer)
        record = record_of(self, session, stop_reason, stop_signal)
        self.storage.write(self.directory / CARD, card(record, session.model.config.AUTO_CLASS).encode())
        self.storage.complete(self.directory)
        record.write(self.directory)
        self.follower.end(record)
        return record
