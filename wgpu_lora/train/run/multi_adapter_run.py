"""What the runs of several adapters share: a directory with their state and their record, and how both are written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.files.atomic import replace_directory
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run import run_checkpoint, training_log
from wgpu_lora.train.run.adapter_run import AdapterRun, memory_of
from wgpu_lora.train.run.multi_adapter_state import MultiAdapterState, link_members, write_multi_adapter_state
from wgpu_lora.train.run.records import AdapterLosses, AdapterRecord, PipelineRecord, RunRecord
from wgpu_lora.train.run.run_checkpoint import LAST, NEXT
from wgpu_lora.train.run.run_state import STATE, read_state
from wgpu_lora.train.session.session import Session


@dataclass
class MultiAdapterRun:
    """What the runs of several adapters share. home: directory of the state and of pipeline.json; args: their common
    options; batch_tokens: maximum tokens of a batch that they share."""

    home: Path
    schedule: str
    batch_tokens: int
    args: TrainingArguments
    state: MultiAdapterState

    @property
    def state_file(self) -> Path | None:
        """The state on disk, if there is one yet."""
        path = self.home / STATE
        return path if path.is_file() else None

    def save(
        self,
        session: Session,
        runs: Sequence[AdapterRun],
        step: int,
        policy: dict[str, Any],
        ended: dict[str, str],
        events: Events,
    ) -> None:
        """Save the checkpoints of all runs as one: all are written, then the state, then all are moved into place.

        Args:
            step: steps of the session. policy: state of the schedule. ended: why runs have ended, by name.
        """
        steps = {run.adapter_name: run.state.step for run in runs}
        state = replace(self.state, step=step, policy=policy, steps=steps, ended=ended)
        moved = [run for run in runs if self.state.steps.get(run.adapter_name) != run.state.step]
        for run in moved:
            run.write_checkpoint(session, run.directory / NEXT)
        write_multi_adapter_state(self.home, state)
        link_members(self.home, (run.directory for run in runs))
        for run in moved:
            replace_directory(run.directory / NEXT, run.directory / LAST)
            events.saved(run.directory / LAST, run.state.step, run.adapter_name)
        self.state = state

    def write(
        self,
        session: Session,
        runs: Sequence[AdapterRun],
        records: Mapping[int, RunRecord],
        step: int,
        signal: str | None,
    ) -> PipelineRecord:
        """Write pipeline.json; returns its contents. records: by slot. signal: that interrupted training."""
        record = PipelineRecord(
            step=step,
            signal=signal,
            schedule=self.schedule,
            batch_tokens=self.batch_tokens,
            options=self.args,
            adapters=[_adapter_record(run, records[run.slot]) for run in runs],
            memory=memory_of(session),
            environment=training_log.environment(session.device),
        )
        record.write(self.home)
        return record


def _adapter_record(run: AdapterRun, record: RunRecord) -> AdapterRecord:
    state = record.state
    return AdapterRecord(
        slot=run.slot,
        name=run.adapter_name,
        data=record.data,
        checkpoint=str(run.directory),
        stop_reason=record.stop_reason,
        step=state.step,
        total_steps=state.total_steps,
        tokens=state.tokens,
        seconds=state.seconds,
        losses=AdapterLosses(state.last_loss, state.first_eval_loss, state.last_eval_loss, state.best_eval_loss),
        trainable_parameters=record.trainable_parameters,
        adapter_sha256=record.adapter_sha256,
        warnings=record.warnings,
    )


def recover(state: MultiAdapterState, directories: Mapping[str, Path]) -> None:
    """Bring every adapter's `last` to the step in the pipeline's state; directories: by name, locked.

    Raises:
        UserError: an adapter's checkpoint is missing, damaged, or of another step.
    """
    for name, step in state.steps.items():
        run_checkpoint.remove_run_leftovers(directories[name])
        last, following = directories[name] / LAST, directories[name] / NEXT
        if (
            following.is_dir()
            and not run_checkpoint.checkpoint_damage(following)
            and read_state(following)[0].step == step
        ):
            replace_directory(following, last)
        if not last.is_dir() or run_checkpoint.check(last)[0].step != step:
            raise UserError(
                f"Adapter '{name}' has no checkpoint of step {step} in {directories[name]}: restore the directory that "
                "the pipeline wrote, or give its new path."
            )
        shutil.rmtree(following, ignore_errors=True)
