"""Qwen3: RMSNorm of each head's queries and keys; sliding windows as in Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgpu_lora.models.blocks.transformer_block import Biases, Transformer, window_size
from wgpu_lora.models.blocks.transformer_gguf import TransformerGGUF
from wgpu_lora.models.config_fields import boolean


class Qwen3(Transformer):
    POSITIONS = 32768
    TRANSFORMERS = "Qwen3ForCausalLM"
    READS_BIASES = Biases(attention=True)
    QK_NORM = True
    HEAD_DIM = 128
    GGUF = TransformerGGUF("qwen3", pretokenizer="qwen2")

    @classmethod
    def window(cls, d: Mapping[str, Any], where: str) -> int | None:
        return window_size(d, where) if boolean(d, "use_sliding_window", where) else None
