"""Phi-3 and Phi-4: one matrix for q, k and v and one for gate and up; a part of each head may be rotated; longrope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from wgpu_lora.models.blocks.phi_gguf import PhiGGUF
from wgpu_lora.models.blocks.transformer_block import Transformer, stated_window
from wgpu_lora.models.rotary_embedding import Rope, parse_longrope, parse_rope


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
        return (stated_window(d, where),) * layers


def _plain(d: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters without the type, if there are any."""
    return {
        name: {key: value for key, value in d[name].items() if key not in ("rope_type", "type")}
        for name in ("rope_parameters", "rope_scaling")
        if isinstance(d.get(name), Mapping)
    }
