"""The loss of an objective other than SFT on held-out rows, and its metrics, for `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from wgpu_lora.data import Source, TokenizedData
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Evaluating, Events
from wgpu_lora.files.json_files import read_json
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.memory_leases import claim
from wgpu_lora.models.adapter_set import AdapterSet, SlotSpec
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.train.objectives import OBJECTIVES, objective_of
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.run.adapter_init import frozen_adapter, initial_adapter
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.run.records import RUN
from wgpu_lora.train.run.resume import resolve_recorded_path
from wgpu_lora.train.run.run_checkpoint import METADATA
from wgpu_lora.train.run.teacher_setup import checked_cache, live_teacher
from wgpu_lora.train.session.data_stream import DataStream, heldout_options
from wgpu_lora.train.session.session import Session, heldout_loss

TEACHER = ("teacher", "teacher_adapter", "teacher_cache")  # options that say whom to learn from
BATCH_TOKENS = 1024  # of a batch; more if a single sample is longer


def objective_options(
    adapter: str | Path | None, objective: str | None, teacher: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The objective to evaluate, and its options as in the adapter's training if that had the same.

    An adapter's records are untrusted: invalid values in them are ignored.

    Args:
        teacher: values of TEACHER for distillation, instead of those of the training. Without it and without an
            objective, an adapter trained by distillation is evaluated like one of supervised fine-tuning.
    """
    teacher_options = {name: value for name, value in (teacher or {}).items() if value is not None}
    if teacher_options and objective not in (None, "kd"):
        raise UserError(
            f"{flag(next(iter(teacher_options)))} is for {setting('objective', 'kd')}, not {objective}: leave it out."
        )
    trained = _trained(Path(adapter)) if adapter is not None else {}
    before = trained.get("objective", "sft")
    if objective and OBJECTIVES[objective].samples:
        raise UserError(
            f"{setting('objective', objective)} has no loss on given answers: leave it out, or measure pass@k."
        )
    own = before != "kd" and not OBJECTIVES[before].samples
    eval_objective = objective or ("kd" if teacher_options else before if own else "sft")
    options = {"objective": eval_objective} | (trained if before == eval_objective else {})
    if teacher_options:
        return {
            name: value for name, value in options.items() if name not in (*TEACHER, "eval_teacher_cache")
        } | teacher_options
    objective_values = {name: value for name, value in options.items() if name != "eval_teacher_cache"}
    return objective_values | (
        {"teacher_cache": options["eval_teacher_cache"]} if options.get("eval_teacher_cache") else {}
    )


def reads(objective: str, source: Source) -> bool:
    """Whether the first row of a source has the columns of the objective's rows."""
    formats = OBJECTIVES[objective].formats
    try:
        _, row = next(iter(source.rows(formats)))
    except (UserError, StopIteration):
        return False
    return isinstance(row, Mapping) and formats.matches([*row])


def _trained(adapter: Path) -> dict[str, Any]:
    for name in (RUN, METADATA):
        try:
            record = read_json(adapter / name)
            recorded = _recorded_objective(record.get("options"))
            for option in ("reference_adapter", *TEACHER, "eval_teacher_cache"):
                if path := recorded.get(option):
                    recorded[option] = resolve_recorded_path(record.get("directory"), path)
            from_values(recorded, name)
        except UserError:
            continue
        return recorded
    return {}


def _recorded_objective(options: Any) -> dict[str, Any]:
    """The recorded objective and the options that it reads."""
    objective = options.get("objective") if isinstance(options, dict) else None
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        return {}
    option_names = {item.name for item in fields(TrainingArguments)}
    read = {item.name for item in fields(OBJECTIVES[objective])} & option_names
    return {name: options[name] for name in ("objective", "objective_args", *sorted(read)) if name in options}


def evaluate_objective(
    model: LoadedModel, prepared: TokenizedData, args: TrainingArguments, events: Events = SILENT
) -> dict[str, float]:
    """The loss and the metrics of an adapter (`init_adapter`), or of the base model alone, on samples.

    Args:
        args: the objective and its options.

    Raises:
        UserError: the options or the adapter are unsuitable, or the device has no room.
    """
    objective, config = objective_of(args), model.config
    args, shape, matrices = initial_adapter(args, config)
    stream = DataStream(prepared, args)
    frozen = frozen_adapter(objective.reference_path, config) if objective.reference_path else None
    teacher = live_teacher(args, model)
    if stream.teacher:
        checked_cache(args, model, prepared)
    session = Session(
        model,
        AdapterSet.declare(config, [SlotSpec.of(shape, matrices)], model.device.max_binding),
        [],
        positions=stream.longest,
        eval_tokens=max(*stream.lengths, min(BATCH_TOKENS, sum(stream.lengths))),
        compute_dtype=args.compute_dtype,
        objectives=[objective],
        references={0: frozen.spec} if frozen else None,
        mismatched=stream.longest_mismatched,
        teachers={0: teacher} if teacher else None,
    )
    with claim(model.device, session.needs(), "evaluation"):
        session.allocate(events)
        try:
            session.place_initial(0, matrices)
            if frozen:
                session.place_reference(0, frozen.matrices)
            at = Evaluating(0, len(stream.prepared.rows))
            result = heldout_loss(session, stream, 0, lambda rows: events.evaluating(replace(at, rows=rows)))
        finally:
            session.close()
    return result


def open_unrounded_model(args: TrainingArguments, device: Device, config: ModelConfig) -> LoadedModel:
    """The declared model that --rounded-from names.

    Raises:
        UserError: it cannot be read, or is not the model that is trained but for how its weights are stored.
    """
    assert args.rounded_from
    model = open_model(args.rounded_from, device)
    if model.config.digest() != config.digest():
        raise UserError(
            f"{setting('rounded_from', args.rounded_from)} is another model than {args.model}: name the one that was "
            "rounded, or leave it out."
        )
    return model


def unrounded_loss(session: Session, run: AdapterRun, events: Events = SILENT) -> float | None:
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
