"""The facts of a run: metadata.json of a checkpoint, and its record at the end."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from wgpu_lora.train import output
from wgpu_lora.train.checkpoint import origin_of
from wgpu_lora.train.records import Data, HeldOut, Memory, RunRecord
from wgpu_lora.train.run import Run
from wgpu_lora.train.schema import SCHEMA
from wgpu_lora.train.session import Session


def metadata(run: Run) -> dict[str, Any]:
    """The contents of metadata.json: facts about a checkpoint for people and tools."""
    state = run.state
    return {
        "schema": SCHEMA,
        "slot": run.slot,
        "name": run.name,
        "epoch": state.epoch,  # of the next step, which is the number of completed ones
        "step": state.step,
        "tokens": state.tokens,
        "losses": {"train": state.last_loss, "held_out": state.last_eval_loss, "best": state.best_eval_loss},
        "options": run.args.as_dict(),
        "data": {"prompt_format": run.stream.prepared.prompt_format},
        **({"run": own} if (own := origin_of(run.directory)) else {}),
        "directory": os.getcwd(),  # base of the relative paths in the options
        "digests": {
            "rows": run.stream.rows_digest(),
            "data": run.stream.prepared.digest,
            "base": run.base_digest,
            "weights": run.weights_sha256,
        },
    }


def record_of(run: Run, session: Session, stop_reason: str, stop_signal: str | None) -> RunRecord:
    """The contents of run.json for a run that has ended; its adapter must already be written."""
    prepared, state = run.stream.prepared, replace(run.state)
    if run.args.target_seconds and not state.calibrated:
        state = replace(state, total_steps=state.step)  # it ended before the number of steps was measured
    return RunRecord(
        stop_reason=stop_reason,
        signal=stop_signal,
        damaged_log_lines=run.log.damaged,
        options=run.args,
        state=state,
        data=Data(prepared.path, prepared.digest, prepared.summary(), prepared.prompt_format),
        eval_data=HeldOut(run.heldout.path, run.heldout.digest) if run.heldout else None,
        base_digest=run.base_digest,
        base_sha256=run.weights_sha256,
        init_adapter_sha256=output.adapter_digest(run.args.init_adapter, run.storage)
        if run.args.init_adapter
        else None,
        adapter_sha256=run.storage.digest(run.directory / run.subject.files[0]),
        trainable_parameters=session.trained.trainable(run.slot, session.model.config),
        memory=memory_of(session),
        environment=output.environment(session.device),
    )


def memory_of(session: Session) -> Memory:
    """Planned memory, and the peak that was allocated."""
    plan = session.memory()
    return Memory(plan.groups, plan.peak, session.device.peak_allocated, plan.host)
