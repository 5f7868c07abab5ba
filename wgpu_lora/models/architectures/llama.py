"""Llama 2 and 3, and models of the same form: no sliding windows, biases as in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.models.blocks.transformer_block import Biases, Transformer
from wgpu_lora.models.blocks.transformer_gguf import TransformerGGUF


class Llama(Transformer):
    TRANSFORMERS = "LlamaForCausalLM"
    READS_BIASES = Biases(attention=True, mlp=True)
    GROUPED = False
    GGUF_INTERLEAVES = True
    GGUF = TransformerGGUF("llama", windowed=False, mlp_bias=True, output_bias=True, factors=True)

    @classmethod
    def window(cls, d: Mapping[str, Any], where: str) -> int | None:
        if d.get("sliding_window") is not None:
            raise UserError(f"sliding_window in {where} is not supported for llama: use another model.")
        return None
