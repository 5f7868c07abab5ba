"""Frozen adapters that objectives compare the trained one with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from wgpu_lora.formats.peft import Matrices, read_adapter
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.lora import SlotSpec, check_fits
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.objectives.base import Objective


@dataclass(frozen=True)
class FrozenAdapter:
    """digest: SHA-256 of its matrices and scalings."""

    spec: SlotSpec
    matrices: Matrices
    digest: str


def frozen_adapter(path: str | Path, config: ModelConfig) -> FrozenAdapter:
    """Read an adapter. Raises UserError if it cannot be read or is of another base model."""
    loaded, matrices = read_adapter(path)
    check_fits(config, matrices, str(path))
    spec, digest = SlotSpec.of(loaded, matrices), hashlib.sha256()
    for module in sorted(matrices):
        digest.update(f"{module} {spec.scaling[module]!r}".encode())
        for matrix in matrices[module]:
            digest.update(matrix.tobytes())
    return FrozenAdapter(spec, matrices, digest.hexdigest())


def starting_at_reference(args: TrainingArguments, objective: Objective) -> tuple[TrainingArguments, str]:
    """The options with the reference adapter as the initial one, unless another is given, and a note."""
    path = objective.reference_path
    if not path or args.init_adapter or args.resume:
        return args, ""
    return replace(args, init_adapter=path), f"starts from the reference adapter {path}"
