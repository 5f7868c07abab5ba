"""Gemma 2: soft caps of scores and logits; every other layer has a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np
from gguf import GGUFWriter

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_header import Header
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.blocks.attention_block import Attention
from wgpu_lora.models.blocks.transformer_block import (
    ATTENTION_NORM,
    Biases,
    GatedMLP,
    Transformer,
    layer_types,
    window_size,
)
from wgpu_lora.models.blocks.transformer_gguf import TransformerGGUF
from wgpu_lora.models.config_fields import boolean, whole
from wgpu_lora.models.layer_context import LayerContext
from wgpu_lora.models.model_config import VECTOR, Parameter
from wgpu_lora.models.rotary_embedding import positive
from wgpu_lora.ops.elementwise import residual

AFTER_ATTENTION, BEFORE_MLP, AFTER_MLP = (
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True, kw_only=True)
class Gemma(Transformer):
    """The common parts of Gemma 2 and Gemma 3.

    query_pre_attn_scalar: scores are divided by its square root.
    attention_cap, final_cap: soft caps of scores and of logits, 0 for none.
    """

    query_pre_attn_scalar: int
    attention_cap: float = 0.0
    final_cap: float = 0.0

    NORM_OFFSET = 1.0
    READS_BIASES = Biases(attention=True)
    HEAD_DIM = 256
    EVERY: ClassVar[int]  # of so many layers, the last has full attention and the others a sliding window
    CAPS: ClassVar[tuple[float | None, float | None]]  # defaults of attn_logit_softcapping and final_logit_softcapping

    @classmethod
    def parse(cls, d: Mapping[str, Any], where: str) -> Self:
        return super().parse({"tie_word_embeddings": True, **d}, where)

    @classmethod
    def own_fields(cls, d: Mapping[str, Any], where: str) -> dict[str, Any]:
        attention, final = (
            _cap(d.get(name, default), name, where)
            for name, default in zip(("attn_logit_softcapping", "final_logit_softcapping"), cls.CAPS, strict=True)
        )
        scalar = whole(d, "query_pre_attn_scalar", where, 256)
        return {"query_pre_attn_scalar": scalar, "attention_cap": attention, "final_cap": final}

    @classmethod
    def _refuse(cls, d: Mapping[str, Any], where: str) -> None:
        act = d.get("hidden_activation", GELU)
        if act != GELU:
            raise UserError(f"hidden_activation {act!r} in {where} is not supported: use a model with {GELU!r}.")
        if d.get("use_bidirectional_attention") is not None and boolean(d, "use_bidirectional_attention", where):
            raise UserError(
                f"use_bidirectional_attention in {where} is not supported: use a model with causal attention."
            )
        super()._refuse({**d, "hidden_act": "silu"}, where)

    @classmethod
    def windows(cls, d: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
        window, types = window_size(d, where), d.get("layer_types")
        if types is None:
            period = whole(d, "sliding_window_pattern", where, cls.EVERY)
            types = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
        kinds = layer_types(types, window, layers, where)
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def embedding_scale(self, dtype: str) -> float:
        # Rounded to the table's dtype as in transformers, whose models are trained with this.
        kind = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}.get(dtype, np.float32)
        return float(kind(self.hidden_size**0.5))

    def logit_cap(self) -> float:
        return self.final_cap

    def layer(self, index: int) -> dict[str, Parameter]:
        result = super().layer(index)
        hidden = Parameter((self.hidden_size,))
        result[f"{AFTER_ATTENTION}.weight"] = replace(hidden, gguf="post_attention_norm")
        result[f"{BEFORE_MLP}.weight"] = replace(hidden, gguf="ffn_norm")
        result[f"{AFTER_MLP}.weight"] = replace(hidden, gguf="post_ffw_norm")
        return {name: replace(item, offset=1.0) if item.kind == VECTOR else item for name, item in result.items()}

    def block(self, block: LayerContext, index: int, x: Tensor) -> Tensor:
        eps = self.rms_norm_eps
        attended = self._attention(index).record(block, block.norm(x, ATTENTION_NORM, eps))
        branch = block.norm(attended, AFTER_ATTENTION, eps)
        x, normed = block.residual_norm(x, branch, BEFORE_MLP, eps)
        return residual(block.rec, x, block.norm(self._mlp.record(block, normed), AFTER_MLP, eps))

    @property
    def _mlp(self) -> GatedMLP:
        return GatedMLP(self.intermediate_size, gelu=True)

    def _attention(self, index: int) -> Attention:
        scale = self.query_pre_attn_scalar**-0.5
        return replace(super()._attention(index), scale=scale, cap=self.attention_cap)


def _cap(value: Any, name: str, where: str) -> float:
    return 0.0 if value is None else positive(value, name, where)


_LOCAL_THETA = 10000.0  # of layers with a window, fixed in llama.cpp
# Layers of the 27B models, whose scores llama.cpp divides by the root of hidden_size / heads instead of head_dim.
_WIDE = {"gemma2": 46, "gemma3": 62}


class GemmaGGUF(TransformerGGUF):
    def fields(self, header: Header) -> dict[str, Any] | None:
        d = super().fields(header)
        if d is None:
            return None
        window = self._required(header, "attention.sliding_window")
        d |= {"sliding_window": window, "query_pre_attn_scalar": self._scalar(d)}
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := self._number(header, name)) is not None:
                d[name] = cap
        if self.name == "gemma3":
            d["rope_parameters"] = {
                "full_attention": d["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_THETA},
            }
        return d

    def _scalar(self, d: dict[str, Any]) -> Any:
        wide = d["num_hidden_layers"] == _WIDE[self.name]
        return d["hidden_size"] // d["num_attention_heads"] if wide else d["head_dim"]

    def config_fields(self, config: Any, path: Path) -> dict[str, Any]:
        result = super().config_fields(config, path)
        result.pop("hidden_act")
        return result | {"hidden_activation": "gelu_pytorch_tanh"}

    def unsupported_feature(self, config: Any) -> str | None:
        gemma: Gemma = config
        sizes = {name: getattr(gemma, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
        window = next((window for window in gemma.sliding_windows if window is not None), None)
        usual = tuple(window if (i + 1) % gemma.EVERY else None for i in range(gemma.num_hidden_layers))
        if gemma.query_pre_attn_scalar != self._scalar({**sizes, "head_dim": gemma.head_dim}):
            return f"a query_pre_attn_scalar of {gemma.query_pre_attn_scalar}"
        if window is None or gemma.sliding_windows != usual:
            return f"full attention in other layers than every {gemma.EVERY}th"
        if gemma.attention_bias:
            return "biases"
        if self.name == "gemma2" and not gemma.tie_word_embeddings:
            return "an LM head of its own"
        if self.name == "gemma2" and not (gemma.attention_cap and gemma.final_cap):
            return "no soft caps"
        if self.name == "gemma3":
            if gemma.final_cap:
                return "a soft cap of its logits"
            if (gemma.local_rope_theta, gemma.local_rope_scaling) != (_LOCAL_THETA, None):  # type: ignore[attr-defined]
                return "rotary embedding of its own in sliding layers"
        return super().unsupported_feature(config)

    def notes(self, config: Any) -> list[str]:
        return []

    def write(self, config: Any, writer: GGUFWriter) -> None:
        super().write(config, writer)
        writer.add_sliding_window(next(window for window in config.sliding_windows if window))
        if config.attention_cap:
            writer.add_attn_logit_softcapping(config.attention_cap)
        if config.final_cap:
            writer.add_final_logit_softcapping(config.final_cap)


class Gemma2(Gemma):
    POSITIONS = 8192
    TRANSFORMERS = "Gemma2ForCausalLM"
    EVERY = 2
    CAPS = (50.0, 30.0)
    GGUF = GemmaGGUF("gemma2", attention_bias=False)
