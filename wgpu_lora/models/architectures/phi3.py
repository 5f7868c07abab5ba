"""Phi-3 and Phi-4: one matrix for q, k and v and one for gate and up; a part of each head may be rotated; longrope."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_header import Header
from wgpu_lora.models.blocks.transformer_block import Transformer, window_size
from wgpu_lora.models.blocks.transformer_gguf import TransformerGGUF
from wgpu_lora.models.rotary_embedding import LongRopeScaling, Rope, parse_longrope, parse_rope

SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"


class PhiGGUF(TransformerGGUF):
    least_tensors = 6

    def fields(self, header: Header) -> dict[str, Any] | None:
        d = super().fields(header)
        if d is None:
            return None
        rotated = self._number(header, "rope.dimension_count", d["head_dim"])
        window = self._number(header, "attention.sliding_window")
        original = self._number(header, "rope.scaling.original_context_length", d["max_position_embeddings"])
        d |= {"sliding_window": window or None, "original_max_position_embeddings": original}
        d["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": d["rope_parameters"]["rope_theta"],
            "partial_rotary_factor": rotated / d["head_dim"] if d["head_dim"] else 1.0,
        }
        if {SHORT, LONG} <= header.tensors.keys():
            # The factors of each pair follow from the tensors; those here are as many.
            ones = [1.0] * (rotated // 2)
            d["rope_parameters"] |= {"rope_type": "longrope", "short_factor": ones, "long_factor": ones}
            if (factor := self._number(header, "rope.scaling.attn_factor")) is not None:
                d["rope_parameters"]["attention_factor"] = factor
        return d

    def rotated(self, header: Header, head_dim: Any) -> Any:
        return head_dim  # a part of it, which `fields` reads

    def ignored_tensors(self, header: Header) -> str:
        return r"rope_factors_(short|long)\.weight"

    def read_tensors(self, config: Transformer, header: Header) -> Transformer:
        scaling = config.rope_scaling
        if not isinstance(scaling, LongRopeScaling):
            return config
        short, long = (_factors(header, name, config.rotary_dim // 2) for name in (SHORT, LONG))
        return replace(config, rope_scaling=replace(scaling, factors=short, long_factors=long))

    def config_fields(self, config: Transformer, path: Any) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
        rope["partial_rotary_factor"] = config.partial_rotary_factor
        result = {"hidden_act": "silu", "rope_parameters": rope}
        if isinstance(scaling := config.rope_scaling, LongRopeScaling):
            rope |= {"rope_type": "longrope", "attention_factor": scaling.attention_factor}
            rope |= {"short_factor": list(scaling.factors), "long_factor": list(scaling.long_factors)}
            rope["original_max_position_embeddings"] = scaling.original_max_position_embeddings
        return result

    def notes(self, config: Transformer) -> list[str]:
        if not isinstance(scaling := config.rope_scaling, LongRopeScaling):
            return super().notes(config)
        original = f"{scaling.original_max_position_embeddings:,}"
        return [
            *super().notes(config),
            f"llama.cpp uses the factors for long texts if its context is longer than {original} tokens, whatever the "
            f"length of the text: give it a context of up to {original} tokens for shorter ones.",
        ]

    def write(self, config: Transformer, writer: GGUFWriter) -> None:
        scaling = config.rope_scaling
        super().write(replace(config, rope_scaling=None), writer)
        if (window := config.sliding_windows[0]) is not None:
            writer.add_sliding_window(window)  # ignored by llama.cpp, but read back by `fields`
        if isinstance(scaling, LongRopeScaling):
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
            writer.add_rope_scaling_attn_factors(scaling.attention_factor)

    def tensors(self, config: Transformer) -> dict[str, np.ndarray]:
        if not isinstance(scaling := config.rope_scaling, LongRopeScaling):
            return {}
        return {LONG: np.array(scaling.long_factors, np.float32), SHORT: np.array(scaling.factors, np.float32)}


def _factors(header: Header, name: str, count: int) -> tuple[float, ...]:
    info, path = header.tensors[name], header.path
    if info.kind != GGMLQuantizationType.F32 or info.shape != (count,):
        raise UserError(f"{name} in {path} does not have {count} F32 values: download or copy the file again.")
    result = np.fromfile(path, "<f4", count, offset=info.offset).astype(np.float64)
    if result.size != count or not all(math.isfinite(value) and value > 0 for value in result):
        raise UserError(f"{name} in {path} are not positive numbers: download or copy the file again.")
    return tuple(result.tolist())


class Phi3(Transformer):
    POSITIONS = 4096
    PARTIAL = 1.0
    GROUPED = False
    FUSED = True
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5, "sliding_window": None}
    TRANSFORMERS = "Phi3ForCausalLM"
    GGUF = PhiGGUF("phi3", attention_bias=False)
    MODULES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")

    @classmethod
    def rope(cls, d: Mapping[str, Any], positions: int, where: str) -> Rope:
        """Without scaling, which needs the dimension of heads."""
        return parse_rope({**d, **_plain(d)}, positions, where, cls.THETA, cls.PARTIAL)

    @classmethod
    def parse(cls, d: Mapping[str, Any], where: str) -> Self:
        config = super().parse(d, where)
        sizes = config.head_dim, config.partial_rotary_factor, config.max_position_embeddings
        return replace(config, rope_scaling=parse_longrope(d, *sizes, where))

    @classmethod
    def windows(cls, d: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
        return (window_size(d, where),) * layers


def _plain(d: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters without the type, if there are any."""
    return {
        name: {key: value for key, value in d[name].items() if key not in ("rope_type", "type")}
        for name in ("rope_parameters", "rope_scaling")
        if isinstance(d.get(name), Mapping)
    }
