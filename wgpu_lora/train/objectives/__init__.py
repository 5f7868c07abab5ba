"""The training objectives, one file each (`--objective`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wgpu_lora.names.registry import Registry
from wgpu_lora.names.spelling import setting
from wgpu_lora.train.option_types import from_options

if TYPE_CHECKING:
    from wgpu_lora.data.row_formats import RowFormats
    from wgpu_lora.formats.tokenizer.examples import Sample
    from wgpu_lora.train.objectives.objective import Objective

OBJECTIVES: Registry[type[Objective]] = Registry(
    {
        "sft": "wgpu_lora.train.objectives.sft:SFT",
        "dpo": "wgpu_lora.train.objectives.dpo:DPO",
        "kto": "wgpu_lora.train.objectives.kto:KTO",
        "orpo": "wgpu_lora.train.objectives.orpo:ORPO",
        "cpo": "wgpu_lora.train.objectives.cpo:CPO",
        "kd": "wgpu_lora.train.objectives.kd:KD",
        "grpo": "wgpu_lora.train.objectives.grpo:GRPO",
        "rloo": "wgpu_lora.train.objectives.rloo:RLOO",
    }
)


def objective_of(args: Any) -> Objective:
    """The objective that TrainingArguments select."""
    return from_options(OBJECTIVES[args.objective], args, "objective")


def formats_of(objective: Objective) -> RowFormats[Sample]:
    """The rows that an objective reads. The error about a row that it does not read names the objectives that do."""
    return replace(objective.formats, other_objectives=_readers)


def _readers() -> list[tuple[RowFormats[Sample], str]]:
    """The formats of objectives that need nothing but rows, and how to choose them."""
    names: dict[int, list[str]] = {}
    kinds = {name: kind for name, kind in OBJECTIVES.items() if not (kind.needs_teacher or kind.samples)}
    for name, kind in kinds.items():
        names.setdefault(id(kind.formats), []).append(name)
    return [
        (kinds[same[0]].formats, " or ".join(setting("objective", name) for name in same)) for same in names.values()
    ]
