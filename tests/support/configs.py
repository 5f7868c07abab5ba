"""A small config.json, and what becomes of it."""

from __future__ import annotations

from typing import Any

from wgpu_lora.models.architectures import parse_config
from wgpu_lora.models.model_config import ModelConfig

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [5, 6],
}


def config(**changes: Any) -> ModelConfig:
    return parse_config({**BASE, **changes}, "here.json")
