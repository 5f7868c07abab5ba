"""The held-out loss of a model before it was rounded to the base that is trained (`--rounded-from`)."""

from __future__ import annotations

from dataclasses import replace

from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.names.naming import setting
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.preferred import evaluate_objective
from wgpu_lora.train.run import Run
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


def measure_unrounded(run: Run, device: Device, config: ModelConfig, events: Events = SILENT) -> None:
    """Set `unrounded_eval_loss`, unless it is known, or nothing is held out. The model is freed again."""
    args = run.args
    if not args.rounded_from or not run.heldout or run.state.unrounded_eval_loss is not None or run.state.step:
        return
    model = unrounded(args, device, config)
    try:
        plain = replace(args, train="lora", target_modules="all-linear", lora_dropout=0.0, resume=False)
        run.state.unrounded_eval_loss = evaluate_objective(model, run.heldout, plain, events)["loss"]
    finally:
        model.unload()
