"""Frozen adapters that objectives compare the trained one with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from wgpu_lora.bounded import read_json
from wgpu_lora.errors import UserError
from wgpu_lora.formats.hub import stated_name
from wgpu_lora.formats.peft import Matrices, read_adapter
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.fitting import read_fitting
from wgpu_lora.models.lora import SlotSpec
from wgpu_lora.names.naming import flag, setting
from wgpu_lora.train.initial import check_whole
from wgpu_lora.train.initialisation import DEFAULT
from wgpu_lora.train.objectives.base import Objective
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.train.records import RUN


@dataclass(frozen=True)
class FrozenAdapter:
    """digest: SHA-256 of its matrices and scalings."""

    spec: SlotSpec
    matrices: Matrices
    digest: str


def frozen_adapter(path: str | Path, config: ModelConfig) -> FrozenAdapter:
    """Read an adapter. Raises UserError if it cannot be read, is damaged or does not fit the model."""
    check_whole(Path(path))
    loaded, matrices = read_fitting(config, path)
    spec, digest = SlotSpec.of(loaded, matrices), hashlib.sha256()
    for module in sorted(matrices):
        digest.update(f"{module} {spec.scaling[module]!r}".encode())
        for matrix in matrices[module]:
            digest.update(matrix.tobytes())
    return FrozenAdapter(spec, matrices, digest.hexdigest())


def check_base(path: str | Path, model: str, digest: str) -> None:
    """Raise UserError if an adapter's record is of a run on other weights than these, of a model of another name.

    Under the same name, the weights may be in another format. Adapters of other programs have no record.
    """
    try:
        trained_on = read_json(Path(path) / RUN).get("base_digest")
    except UserError:
        return
    name = read_adapter(path)[0].base_model_name_or_path or ""
    other = bool(name) and Path(name).name != Path(stated_name(model)).name
    if other and isinstance(trained_on, str) and trained_on != digest:
        raise UserError(
            f"The reference adapter {path} was trained on another base model, {name!s:.200}, not on {model}: use that "
            "model, or another reference."
        )


def starting_at_reference(args: TrainingArguments, objective: Objective) -> tuple[TrainingArguments, str]:
    """The options with the reference adapter as the initial one, unless another is given, and a note."""
    path = objective.reference_path
    if not path or args.init_adapter or args.resume:
        return args, ""
    if args.init_lora_weights != DEFAULT:
        said = setting("init_lora_weights", args.init_lora_weights)
        raise UserError(
            f"{said} and {flag('reference_adapter')} cannot be combined: training starts from the reference, so leave "
            "one out."
        )
    return replace(args, init_adapter=path), f"starts from the reference adapter {path}"
