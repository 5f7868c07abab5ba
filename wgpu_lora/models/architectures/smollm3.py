"""SmolLM3: Llama's form, in which some layers, by default every fourth, have no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from wgpu_lora.errors import UserError
from wgpu_lora.models.blocks.transformer_block import Biases, Transformer, layer_types
from wgpu_lora.models.blocks.transformer_gguf import TransformerGGUF
from wgpu_lora.models.config_fields import boolean, whole

EVERY = 4  # default of no_rope_layer_interval


class SmolLM3GGUF(TransformerGGUF):
    """llama.cpp knows which layers have no positions, and has no biases."""

    def unsupported_feature(self, config: Transformer) -> str | None:
        if config.rotated_layers != rotated_layers({}, config.num_hidden_layers, ""):
            return f"layers without positions other than every {EVERY}th"
        if config.attention_bias or config.mlp_bias:
            return "biases"
        return super().unsupported_feature(config)


class SmolLM3(Transformer):
    POSITIONS = 32768
    THETA = 2e6
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"tie_word_embeddings": True}
    TRANSFORMERS = "SmolLM3ForCausalLM"
    READS_BIASES = Biases(attention=True, mlp=True)
    GGUF_INTERLEAVES = True
    GGUF = SmolLM3GGUF("smollm3", attention_bias=False, pretokenizer="smollm")

    @classmethod
    def parse(cls, d: Mapping[str, Any], where: str) -> Self:
        config = super().parse(d, where)
        return replace(config, rotated_layers=rotated_layers(d, config.num_hidden_layers, where))

    @classmethod
    def windows(cls, d: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
        """Windows of layers without positions, unless layer_types says which have one."""
        window = whole(d, "sliding_window", where) if d.get("sliding_window") is not None else None
        types = d.get("layer_types")
        if types is not None:
            kinds = layer_types(types, window, layers, where)
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        default = window if boolean(d, "use_sliding_window", where) else None
        return tuple(None if rotated else default for rotated in rotated_layers(d, layers, where))


def rotated_layers(d: Mapping[str, Any], layers: int, where: str) -> tuple[bool, ...]:
    """Which layers have rotary embedding: no_rope_layers, in which 1 means so, or all but every
    no_rope_layer_interval-th. Raises UserError."""
    flags = d.get("no_rope_layers")
    if flags is None:
        period = whole(d, "no_rope_layer_interval", where, EVERY)
        return tuple((layer + 1) % period != 0 for layer in range(layers))
    if not isinstance(flags, list) or len(flags) != layers or any(item not in (0, 1) for item in flags):
        raise UserError(
            f"no_rope_layers in {where} must list {layers} layers (num_hidden_layers), each 0 or 1: correct the file."
        )
    return tuple(bool(item) for item in flags)
