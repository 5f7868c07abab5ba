"""Mistral's dense models: Llama's form, with the same sliding window, if any, in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.models.blocks.transformer_block import Transformer, layer_types, window_size
from wgpu_lora.models.blocks.transformer_gguf import TransformerGGUF
from wgpu_lora.models.multimodal import TEXT_PART


class Mistral(Transformer):
    POSITIONS = 131072
    TRANSFORMERS = "MistralForCausalLM"
    GGUF_INTERLEAVES = True
    GGUF = TransformerGGUF(
        "llama", windowed=True, mlp_bias=True, output_bias=True, factors=True
    )  # llama.cpp runs it as llama
    STORED = TEXT_PART

    @classmethod
    def windows(cls, d: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
        return same_windows(d, layers, where)


def same_windows(d: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
    """The window of all layers alike. Raises UserError if layer_types says otherwise."""
    window, types = window_size(d, where), d.get("layer_types")
    kinds = [] if types is None else layer_types(types, window, layers, where)
    if window is not None and "full_attention" in kinds:
        raise UserError(
            f"layer_types in {where} mixes attention kinds, which {d['model_type']} does not: use another model."
        )
    return (window,) * layers
