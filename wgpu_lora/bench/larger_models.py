"""Projections of a measured training to larger models: memory from their plans, time from counted operations.

A grade says how much of the memory that runs may use the plan would take (see GRADES).

Memory is exact for rows of the maximum length. Time is a projection, not a measurement: it assumes that the operations
of the larger model run at the measured rate. It does not hold if a device is faster at larger products, or has too
little memory for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from wgpu_lora.bench.contract import load_contract, numbers_of
from wgpu_lora.bench.training_step import TrainingStep
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.memory_leases import budget_bytes
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.models.synthetic_models import synthetic_model
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT, base_format

MEASURED, TOO_LARGE, UNKNOWN = "measured", "does not fit", "not known"
GRADES = (("excellent", 0.5), ("good", 0.75), ("possible", 0.9), ("tight", 1.0))  # up to this share of the budget
LARGER = ("qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "llama-2-13b")
Record = dict[str, Any]


def operations(config: ModelConfig, rank: int, tokens: float) -> float:
    """Operations of training on one row of that many tokens, by the contract of the brick `train_step`."""
    contract = load_contract("train_step")
    keys = {"tokens": tokens, "rank": float(rank), "pairs": tokens * (tokens + 1) / 2, "trained": tokens - 1}
    keys["weight_bits"] = base_format(DEFAULT_FORMAT).bits  # of bytes only
    return contract.operations(contract.values(numbers_of(config) | keys))


def grade(peak: int | None, available: int | None) -> str:
    """The grade of a plan's peak."""
    if peak is None or available is None:
        return TOO_LARGE if peak is None else UNKNOWN
    return next((name for name, share in GRADES if peak <= share * available), TOO_LARGE)


def project(
    speeds: Mapping[str, float],
    samples: int | None,
    args: TrainingArguments,
    model: LoadedModel,
    shapes: Sequence[str] = LARGER,
    peak: int | None = None,
) -> Iterator[Record]:
    """Yields a record of the measured model, if there are shapes, and of each shape: the peak of its plan, and the
    projected speed and time of the same training.

    Args:
        peak: of the runs' plan.
        speeds: medians of the runs. args, model: of the runs.
        samples: of the whole training, all epochs of a recipe; None for those that were timed.
    """
    tokens, speed = speeds["tokens_per_second"], speeds["samples_per_second"]
    seconds = samples / speed if samples else speeds["seconds"]
    available = budget_bytes(model.device.info, None).bytes
    if shapes:
        rates = {name: speeds[name] for name in ("samples_per_second", "tokens_per_second")}
        baseline = {"kind": "projection", "shape": model.name, "times_the_operations": 1.0, **rates, "seconds": seconds}
        yield baseline | {"peak_planned": peak, "fits": True, "grade": MEASURED}
    for shape in shapes:
        larger = shape_config(shape)
        times = operations(larger, args.lora_r, tokens / speed) / operations(model.config, args.lora_r, tokens / speed)
        record: Record = {
            "kind": "projection",
            "shape": shape,
            "times_the_operations": times,
            "samples_per_second": speed / times,
            "tokens_per_second": tokens / times,
            "seconds": seconds * times,
        }
        try:
            declared = synthetic_model(larger, model.device, args.base_dtype, shape)
            length = min(args.length, larger.max_position_embeddings)
            peak = TrainingStep(declared, replace(args, max_length=length)).session.memory().peak_device_bytes
            record |= {"peak_planned": peak, "fits": None if available is None else peak <= available}
        except UserError as error:
            record |= {"peak_planned": None, "fits": False, "refused": str(error)}
        yield record | {"grade": grade(record["peak_planned"], available)}
