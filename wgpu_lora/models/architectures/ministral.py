"""Ministral: Mistral's form with attention kinds by layer (`ministral`), and with queries scaled by position
(`ministral3`). `mistral3` is the text part, of either form, of models that also see images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gguf import GGUFWriter

from wgpu_lora.formats.gguf.gguf_header import Header
from wgpu_lora.models.architectures.mistral import Mistral, same_windows
from wgpu_lora.models.blocks.attention_block import Attention
from wgpu_lora.models.blocks.transformer_block import Transformer, layer_types, window_size
from wgpu_lora.models.blocks.transformer_gguf import TransformerGGUF
from wgpu_lora.models.config_fields import whole
from wgpu_lora.models.multimodal import TEXT_PART, TextPart
from wgpu_lora.models.rotary_embedding import DEFAULT_THETA, RopeTable, positive, rope_fields


class Ministral(Transformer):
    POSITIONS = 131072
    TRANSFORMERS = "MinistralForCausalLM"

    @classmethod
    def windows(cls, d: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
        window, types = window_size(d, where), d.get("layer_types")
        if types is None:
            return (window,) * layers
        kinds = layer_types(types, window, layers, where)
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class Ministral3GGUF(TransformerGGUF):
    """llama.cpp's `mistral3`, whose files without a scale of queries are of plain Mistral models."""

    def fields(self, header: Header) -> dict[str, Any] | None:
        d = super().fields(header)
        if d is None:
            return None
        d["sliding_window"] = self._number(header, "attention.sliding_window")
        beta, original = "attention.temperature_scale", "rope.scaling.original_context_length"
        if not self._number(header, beta):
            return {**d, "model_type": "mistral"}
        scale = {"llama_4_scaling_beta": self._required(header, beta)}
        scale["original_max_position_embeddings"] = self._required(header, original)
        return {**d, "rope_parameters": {**d["rope_parameters"], **scale}}

    def config_fields(self, config: Any, path: Path) -> dict[str, Any]:
        result = super().config_fields(config, path)
        if config.query_beta and "rope_parameters" in result:  # which replaces those of `fields`
            scale = {"llama_4_scaling_beta": config.query_beta}
            scale["original_max_position_embeddings"] = config.query_original
            result["rope_parameters"] |= scale
        return result

    def write(self, config: Any, writer: GGUFWriter) -> None:
        super().write(config, writer)
        if (window := config.sliding_windows[0]) is not None:
            writer.add_sliding_window(window)  # ignored by llama.cpp, but read back by `fields`
        if config.query_beta:
            writer.add_attn_temperature_scale(config.query_beta)
            if config.rope_scaling is None or config.rope_scaling.rope_type != "yarn":
                writer.add_rope_scaling_orig_ctx_len(config.query_original)


@dataclass(frozen=True)
class ScaledTable(RopeTable):
    """The table of queries that are multiplied by 1 + beta log(1 + floor(position / original)), too."""

    beta: float = 0.0
    original: int = 1

    def values(self, positions: int) -> np.ndarray:
        scale = 1 + self.beta * np.log1p(np.arange(positions) // self.original)
        return (super().values(positions) * scale[:, None, None]).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Ministral3(Transformer):
    """query_beta, query_original: of `ScaledTable`; 0 if queries are not scaled."""

    query_beta: float = 0.0
    query_original: int = 1

    POSITIONS = 262144
    THETA = 1e6
    TRANSFORMERS = "Ministral3ForCausalLM"
    GGUF_INTERLEAVES = True
    GGUF = Ministral3GGUF("mistral3", attention_bias=False, factors=True, log_multiplier=True)
    STORED = TEXT_PART
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None}

    @classmethod
    def windows(cls, d: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
        return same_windows(d, layers, where)

    @classmethod
    def own_fields(cls, d: Mapping[str, Any], where: str) -> dict[str, Any]:
        rope = rope_fields(d, where)
        if d.get("text_type") == "mistral":  # which has no such scale
            return {}
        beta = positive(rope.get("llama_4_scaling_beta"), "llama_4_scaling_beta", where)
        return {"query_beta": beta, "query_original": whole(rope, "original_max_position_embeddings", where)}

    def tables(self) -> list[RopeTable]:
        return [self._rope, *([self._query_rope] if self._query_rope else [])]

    @property
    def _query_rope(self) -> ScaledTable | None:
        if not self.query_beta:
            return None
        plain = self._rope
        return ScaledTable(plain.rotary_dim, plain.rope_theta, plain.rope_scaling, self.query_beta, self.query_original)

    def _attention(self, index: int) -> Attention:
        return replace(super()._attention(index), query_rope=self._query_rope)


class Mistral3(TextPart, Ministral3):
    TRANSFORMERS = "Mistral3ForConditionalGeneration"
    AUTO_CLASS = "AutoModelForImageTextToText"
    TEXT_TYPES = ("mistral", "ministral3")

    @classmethod
    def defaults(cls, d: Mapping[str, Any]) -> Mapping[str, Any]:
        if d["text_type"] == "ministral3":
            return cls.DEFAULTS
        return {"rope_theta": DEFAULT_THETA, "max_position_embeddings": Mistral.POSITIONS}
