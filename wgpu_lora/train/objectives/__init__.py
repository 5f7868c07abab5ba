"""The training objectives, one file each (`--objective`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wgpu_lora.registry import Registry, with_options

if TYPE_CHECKING:
    from wgpu_lora.train.objectives.base import Objective

OBJECTIVES: Registry[type[Objective]] = Registry({"sft": "wgpu_lora.train.objectives.sft:SFT"})


def objective_of(args: Any) -> Objective:
    """The objective that TrainingArguments select."""
    return with_options(OBJECTIVES[args.objective], args)
