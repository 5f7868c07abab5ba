"""Ministral: Mistral's form with attention kinds by layer (`ministral`), and with queries scaled by position
(`ministral3`). `mistral3` is the text part, of either form, of models that also see images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.models.architectures.mistral import same_windows
from wgpu_lora.models.blocks.attention import Attention
from wgpu_lora.models.blocks.transformer import Transformer, layer_types, stated_window
from wgpu_lora.models.composite import Composite
from wgpu_lora.models.fields import whole
from wgpu_lora.models.rope import RopeTable, positive, stated_rope


class Ministral(Transformer):
    POSITIONS = 131072
    TRANSFORMERS = "MinistralForCausalLM"

    @classmethod
    def windows(cls, d: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
        window, types = stated_window(d, where), d.get("layer_types")
        if types is None:
            return (window,) * layers
        kinds = layer_types(types, window, layers, where)
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)


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
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None}

    @classmethod
    def windows(cls, d: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
        return same_windows(d, layers, where)

    @classmethod
    def own_fields(cls, d: Mapping[str, Any], where: str) -> dict[str, Any]:
        rope = stated_rope(d, where)
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


class Mistral3(Composite, Ministral3):
    TRANSFORMERS = "Mistral3ForConditionalGeneration"
    TEXT_TYPES = ("mistral", "ministral3")
