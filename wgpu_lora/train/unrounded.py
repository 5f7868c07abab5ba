"""The held-out loss of a model before it was rounded to the base that is trained (`--rounded-from`)."""

from __future__ import annotations

import math
from dataclasses import replace

from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Evaluating, Events
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.names.naming import setting
from wgpu_lora.share import claim
from wgpu_lora.train.heldout import heldout_loss
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.train.run import Run
from wgpu_lora.train.session import Session
from wgpu_lora.train.stream import DataStream, heldout_options
from wgpu_lora.weights.registry import DEFAULT_FORMAT


def unrounded(args: TrainingArguments, device: Device, config: ModelConfig) -> LoadedModel:
    """The declared model that --rounded-from names.

    Raises:
        UserError: it cannot be read, or is not the model that is trained but for how its weights are stored.
    """
    assert args.rounded_from
    model = open_model(args.rounded_from, device, DEFAULT_FORMAT)
    if model.config.digest() != config.digest():
        raise UserError(
            f"{setting('rounded_from', args.rounded_from)} is another model than {args.model}: name the one that was "
            "rounded, or leave it out."
        )
    return model


def loss_of(session: Session, run: Run, events: Events = SILENT) -> float | None:
    """The loss on a run's held-out rows in a session without training, which is closed; None if it is not finite."""
    assert run.heldout
    device, model = session.device, session.model
    at = Evaluating(0, len(run.heldout.rows))
    with claim(device, session.needs(), "the model before rounding"):
        session.allocate(events)
        try:
            stream = DataStream(run.heldout, heldout_options(run.args))
            loss = heldout_loss(session, stream, 0, lambda rows: events.evaluating(replace(at, rows=rows)))["loss"]
        finally:
            session.close()
            model.unload()
    return loss if math.isfinite(loss) else None
