"""What a measured training would take on larger models: memory from their plans, time from counted operations.

Memory is exact for rows of full length, as every plan is. Time is a projection and no measurement: it takes the larger
model's operations to run at the rate that the measured one's ran at, so it errs where a device does larger products
better, or has no room for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wgpu_lora.bench.contract import load_contract, numbers_of
from wgpu_lora.bench.step import TrainingStep
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.shapes import shape_config
from wgpu_lora.models.synthetic import synthetic_model
from wgpu_lora.share import budget_bytes
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.weights.registry import DEFAULT_FORMAT, base_format

LARGER = ("qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "llama-2-13b")
Record = dict[str, Any]


def operations(config: ModelConfig, rank: int, tokens: float) -> float:
    """Counted operations of training one row of so many tokens, by the contract of the brick `train_step`."""
    contract = load_contract("train_step")
    keys = {"tokens": tokens, "rank": float(rank), "pairs": tokens * (tokens + 1) / 2, "trained": tokens - 1}
    return contract.operations(
        contract.values(numbers_of(config) | keys | {"weight_bits": base_format(DEFAULT_FORMAT).bits})
    )


def project(found: Record, config: ModelConfig, device: Device, shapes: Sequence[str] = LARGER) -> list[Record]:
    """A record for each shape: its plan's peak, and the projected speed and time of the same training.

    The time is that of all epochs of a recipe, and of the steps that were timed for a shape.

    Args:
        found: what `run_training` returned. config: of the model that it trained.
    """
    args = TrainingArguments(**found["header"]["work"]["options"])
    medians = {name: spread["median"] for name, spread in found["summary"]["spread"].items()}
    tokens, samples, seconds = (medians[name] for name in ("tokens_per_second", "samples_per_second", "seconds"))
    if whole := found["header"]["work"]["samples"]:
        seconds = whole / samples
    length = tokens / samples
    available = budget_bytes(device.info, None).bytes
    records: list[Record] = []
    for shape in shapes:
        larger = shape_config(shape)
        times = operations(larger, args.lora_r, length) / operations(config, args.lora_r, length)
        record: Record = {
            "kind": "projection",
            "shape": shape,
            "times_the_operations": times,
            "samples_per_second": samples / times,
            "tokens_per_second": tokens / times,
            "seconds": seconds * times,
        }
        try:
            record["peak_planned"] = _peak(larger, shape, args, device)
            record["fits"] = None if available is None else record["peak_planned"] <= available
        except UserError as error:
            record |= {"peak_planned": None, "fits": False, "refused": str(error)}
        records.append(record)
    return records


def _peak(config: ModelConfig, shape: str, args: TrainingArguments, device: Device) -> int:
    model = synthetic_model(config, device, args.base_dtype, shape)
    rows, tokens = args.batching[1], min(args.length, config.max_position_embeddings)
    step = TrainingStep(
        model, rows, tokens, args.lora_r, args.gradient_checkpointing, args.target_modules, args.compute_dtype
    )
    return step.session.memory().peak
