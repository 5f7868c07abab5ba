"""Qwen2 and Qwen2.5: biases of q, k and v; layers from max_window_layers on may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgpu_lora.models.blocks.transformer_block import Biases, Transformer, window_size
from wgpu_lora.models.blocks.transformer_gguf import TransformerGGUF
from wgpu_lora.models.config_fields import boolean


class Qwen2(Transformer):
    POSITIONS = 32768
    TRANSFORMERS = "Qwen2ForCausalLM"
    READS_BIASES = Biases(attention=True)
    GGUF = TransformerGGUF("qwen2", attention_bias=False, split_heads=False, pretokenizer="qwen2")

    @classmethod
    def biases(cls, d: Mapping[str, Any], where: str) -> Biases:
        return Biases(attention=True)

    @classmethod
    def window(cls, d: Mapping[str, Any], where: str) -> int | None:
        return window_size(d, where) if boolean(d, "use_sliding_window", where) else None
