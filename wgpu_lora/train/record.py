"""What a pipeline leaves in --output: state.json to resume from, pipeline.json and the loss curves.

Slots' checkpoints and the pipeline's state must agree, though a crash may fall between any two writes. So every slot
first writes `.next`; then state.json, replaced atomically, says which steps count; then each `.next` becomes `last`.
`recover` finishes, or forgets, what a crash left half done.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.formats.atomic import replace_directory, write_bytes_atomic
from wgpu_lora.train import checkpoint, output
from wgpu_lora.train.checkpoint import LAST, STATE
from wgpu_lora.train.policy import policy_state
from wgpu_lora.train.slot import AdapterRun
from wgpu_lora.train.trainer import Trainer

PIPELINE, NEXT = "pipeline.json", ".next"


@dataclass
class PipelineState:
    """Where a pipeline stood: steps of the whole, what its policy remembers, and by name each adapter's own steps and
    why it ended, if it did for good."""

    identity: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    policy: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)


def read_pipeline_state(directory: Path) -> PipelineState:
    """Raises UserError where there is none, or it is damaged."""
    path = directory / STATE
    if not path.is_file():
        raise UserError(f"There is no pipeline in {directory} to resume: start without --resume.")
    try:
        return PipelineState(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"The pipeline's state {path} cannot be read ({error}): start again elsewhere.") from error


def recover(state: PipelineState, directories: Mapping[str, Path]) -> None:
    """Brings every adapter's `last` to the step that the pipeline's state says; directories: by name.

    Raises:
        UserError: an adapter's checkpoint is missing or of another step.
    """
    for name, step in state.steps.items():
        last, following = directories[name] / LAST, directories[name] / NEXT
        if _step(following) == step:
            replace_directory(following, last)
        shutil.rmtree(following, ignore_errors=True)
        if _step(last) != step:
            raise UserError(
                f"Adapter '{name}' has no checkpoint of step {step} in {directories[name]}: name the directory that "
                "the pipeline wrote to."
            )


def _step(directory: Path) -> int | None:
    try:
        return checkpoint.read_state(directory)[0].step
    except UserError:
        return None


@dataclass
class PipelineRecord:
    """Keeps a pipeline's checkpoints, all slots' together."""

    directory: Path
    save_steps: int
    state: PipelineState

    def due(self, trainer: Trainer) -> bool:
        return bool(self.save_steps) and trainer.step % self.save_steps == 0

    def save(self, trainer: Trainer) -> None:
        for_good = {p.run.name: p.ended for p in trainer.all if p.ended and p.ended != "interrupt"}
        state = PipelineState(
            self.state.identity,
            trainer.step,
            policy_state(trainer.policy),
            {run.name: run.state.step for run in trainer.runs},
            for_good,
        )
        moved = [run for run in trainer.runs if self.state.steps.get(run.name) != run.state.step]
        for run in moved:
            run.write_checkpoint(trainer.session, run.directory / NEXT)
        write_bytes_atomic(self.directory / STATE, (json.dumps(vars(state), indent=1) + "\n").encode())
        for run in moved:
            replace_directory(run.directory / NEXT, run.directory / LAST)
        self.state = state


def write_pipeline(
    directory: Path, runs: Sequence[AdapterRun], trainer: Trainer, options: dict[str, Any]
) -> dict[str, Any]:
    """Writes pipeline.json, and returns what it holds."""
    session = trainer.session
    plan = session.memory()
    adapters = []
    for run in runs:
        facts = trainer.facts[run.slot]
        state = run.state
        adapters.append(
            {
                "slot": run.slot,
                "name": run.name,
                "data": facts["data"],
                "checkpoint": str(run.directory),
                "stop_reason": facts["stop_reason"],
                "step": state.step,
                "total_steps": state.total_steps,
                "tokens": state.tokens,
                "seconds": state.seconds,
                "losses": {"train": state.last_loss, "held_out": state.last_eval_loss, "best": state.best_eval_loss},
                "trainable_parameters": facts["trainable_parameters"],
                "adapter_sha256": facts["adapter_sha256"],
            }
        )
    record = {
        "step": trainer.step,
        "options": options,
        "adapters": adapters,
        "memory": {"groups": plan.groups, "peak": plan.peak, "peak_allocated": session.device.peak_allocated},
        "environment": output.environment(session.device),
    }
    write_bytes_atomic(directory / PIPELINE, (json.dumps(record, indent=1) + "\n").encode())
    return record
