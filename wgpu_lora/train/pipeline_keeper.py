"""The files in a pipeline's home: state.json to resume from, pipeline.json and the loss curves.

The slots' checkpoints and the pipeline's state must agree even if a crash happens between two writes. So every slot
first writes `.next`; then state.json, replaced atomically, records the steps; then each `.next` becomes `last`.
`recover` completes or discards what a crash left unfinished.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from wgpu_lora.atomic import replace_directory
from wgpu_lora.errors import UserError
from wgpu_lora.train import checkpoint, output
from wgpu_lora.train.checkpoint import LAST, NEXT
from wgpu_lora.train.ending import RESUMABLE
from wgpu_lora.train.facts import memory_of
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.train.pipeline_state import PipelineState, link_members, write_pipeline_state
from wgpu_lora.train.policy import policy_state
from wgpu_lora.train.records import AdapterLosses, AdapterRecord, PipelineRecord, RunRecord
from wgpu_lora.train.slot import AdapterRun
from wgpu_lora.train.state import read_state
from wgpu_lora.train.trainer import Trainer


def recover(state: PipelineState, directories: Mapping[str, Path]) -> None:
    """Bring every adapter's `last` to the step in the pipeline's state; directories: by name, locked.

    Raises:
        UserError: an adapter's checkpoint is missing, damaged, or of another step.
    """
    for name, step in state.steps.items():
        checkpoint.sweep_run(directories[name])
        last, following = directories[name] / LAST, directories[name] / NEXT
        if following.is_dir() and not checkpoint.fault(following) and read_state(following)[0].step == step:
            replace_directory(following, last)
        if not last.is_dir() or checkpoint.check(last)[0].step != step:
            raise UserError(
                f"Adapter '{name}' has no checkpoint of step {step} in {directories[name]}: restore the directory that "
                "the pipeline wrote, or give its new path."
            )
        shutil.rmtree(following, ignore_errors=True)


@dataclass
class PipelineKeeper:
    """Saves the checkpoints of all slots of a pipeline together."""

    directory: Path
    save_steps: int
    state: PipelineState

    def due(self, trainer: Trainer) -> bool:
        first_best = not self.state.steps and any(run.state.best_step for run in trainer.runs)  # best/ has no others
        return first_best or trainer.overdue() or (bool(self.save_steps) and trainer.step % self.save_steps == 0)

    def epoch_done(self, run: AdapterRun, number: int, trainer: Trainer) -> None:
        run.save_epoch(trainer.session, number)

    def save(self, trainer: Trainer) -> None:
        state = replace(
            self.state,
            step=trainer.step,
            policy=policy_state(trainer.policy),
            steps={run.adapter_name: run.state.step for run in trainer.runs},
            ended={p.run.adapter_name: p.ended for p in trainer.all if p.ended and p.ended not in RESUMABLE},
        )
        moved = [run for run in trainer.runs if self.state.steps.get(run.adapter_name) != run.state.step]
        for run in moved:
            run.write_checkpoint(trainer.session, run.directory / NEXT)
        write_pipeline_state(self.directory, state)
        link_members(self.directory, (run.directory for run in trainer.runs))
        for run in moved:
            replace_directory(run.directory / NEXT, run.directory / LAST)
            trainer.events.saved(run.directory / LAST, run.state.step, run.adapter_name)
        self.state = state


def write_pipeline(
    directory: Path, trainer: Trainer, args: TrainingArguments, schedule: str, batch_tokens: int
) -> PipelineRecord:
    """Write pipeline.json; returns its contents."""
    session = trainer.session
    record = PipelineRecord(
        step=trainer.step,
        signal=trainer.signal,
        schedule=schedule,
        batch_tokens=batch_tokens,
        options=args,
        adapters=[_adapter_record(run, trainer.records[run.slot]) for run in trainer.runs],
        memory=memory_of(session),
        environment=output.environment(session.device),
    )
    record.write(directory)
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
    )
