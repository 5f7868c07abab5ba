"""A model small enough to run every brick of it, and results that nothing measured."""

from __future__ import annotations

from typing import Any

from wgpu_lora.bench.brick import Context
from wgpu_lora.bench.brick_results import Result
from wgpu_lora.bench.bricks.layer_bricks import OF_DELTA_NETS
from wgpu_lora.bench.device_ceilings import Ceilings
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.architectures import parse_config
from wgpu_lora.models.published_shapes import cut
from wgpu_lora.models.synthetic_models import synthetic_model

MINI = parse_config(
    {
        "model_type": "qwen3", "vocab_size": 192, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }
)  # fmt: skip
# Two layers, both of which are delta nets.
MINI_DELTA = parse_config(
    {
        "model_type": "qwen3_5_text", "vocab_size": 192, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }
)  # fmt: skip
MINI_ROW = ("qwen3", 128, 64, 128, 3, 2, 1, 32, 1e-6, 1e6, True, 64)  # of models.published_shapes, with three layers
CEILINGS = Ceilings(100.0, 10.0, 20.0, 1e-5, None, "timestamps")


def mini(device: Device, layers: int = 1, base_dtype: str = "nf4", brick: str = "", **changes: Any) -> Context:
    """The context of a brick, if it needs another model than the others."""
    config = MINI_DELTA if brick in OF_DELTA_NETS else MINI
    model = synthetic_model(cut(config, layers), device, base_dtype, "mini")
    return Context(model, **{"tokens": 16, "rank": 4, **changes})


def result(brick: str = "rope", seconds: float = 1.0, spread: float = 0.01, **changes: Any) -> Result:
    values: dict[str, Any] = {
        "brick": brick, "case": "", "options": {}, "clock": "host", "seconds": seconds,
        "p20": seconds * (1 - spread), "p80": seconds * (1 + spread), "cv": spread, "iterations": 5,
        "operations": 1e9, "bytes": 1e9, "gflops": 1 / seconds, "gbs": 1 / seconds,
        "budget": {"of": "fma", "asked": None, "reached": 0.5},
        "reference": None, "seed": 0,
    }  # fmt: skip
    return Result(**{**values, **changes})
