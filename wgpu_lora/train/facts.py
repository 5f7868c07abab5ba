"""What a run says of itself: metadata.json of a checkpoint, and run.json at its end."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from wgpu_lora.atomic import file_digest
from wgpu_lora.formats.peft import WEIGHTS
from wgpu_lora.train import output
from wgpu_lora.train.session import Session

if TYPE_CHECKING:
    from wgpu_lora.train.slot import AdapterRun


def metadata(run: AdapterRun) -> dict[str, Any]:
    """metadata.json: what a person or a tool wants to know of a checkpoint."""
    state = run.state
    return {
        "slot": run.slot,
        "name": run.name,
        "epoch": state.epoch,  # that the next step belongs to: as many are done
        "step": state.step,
        "tokens": state.tokens,
        "losses": {"train": state.last_loss, "held_out": state.last_eval_loss, "best": state.best_eval_loss},
        "options": run.args.as_dict(),
        "directory": os.getcwd(),  # that relative paths among them are of
        "digests": {
            "rows": run.stream.rows_digest(),
            "data": run.stream.prepared.digest,
            "base": run.base_digest,
            "weights": run.weights_sha256,
        },
    }


def facts_of(run: AdapterRun, session: Session) -> dict[str, Any]:
    """run.json but for why the run ended; its adapter is written already."""
    prepared, plan, state = run.stream.prepared, session.memory(), asdict(run.state)
    if run.args.target_seconds and not run.state.calibrated:
        state["total_steps"] = run.state.step  # it ended before there was a budget
    return {
        "damaged_log_lines": run.log.damaged,
        "options": run.args.as_dict(),
        "state": state,
        "data": {"path": prepared.path, "digest": prepared.digest, "summary": prepared.summary()},
        "eval_data": run.heldout and {"path": run.heldout.path, "digest": run.heldout.digest},
        "base_digest": run.base_digest,
        "base_sha256": run.weights_sha256,
        "init_adapter_sha256": run.args.init_adapter and output.adapter_digest(run.args.init_adapter),
        "adapter_sha256": file_digest(run.directory / WEIGHTS),
        "trainable_parameters": session.adapters.trainable(run.slot, session.model.config),
        "memory": {"groups": plan.groups, "peak": plan.peak, "peak_allocated": session.device.peak_allocated},
        "environment": output.environment(session.device),
    }
