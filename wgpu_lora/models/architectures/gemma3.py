"""Gemma 3: norms of each head's queries and keys; five layers with a sliding window, and rotary embedding of their own,
to one with full attention. `gemma3` is the text part of models that also see images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from wgpu_lora.errors import UserError
from wgpu_lora.models.architectures.gemma2 import Gemma, GemmaGGUF
from wgpu_lora.models.blocks.attention_block import Attention
from wgpu_lora.models.multimodal import TEXT_PART, TextPart
from wgpu_lora.models.rotary_embedding import Rope, RopeScaling, RopeTable, parse_rope, rope_fields

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Gemma3Text(Gemma):
    """local_rope_theta, local_rope_scaling: of the layers with a sliding window."""

    local_rope_theta: float
    local_rope_scaling: RopeScaling | None = None

    POSITIONS = 131072
    THETA = 1e6
    QK_NORM = True
    TRANSFORMERS = "Gemma3ForCausalLM"
    EVERY = 6
    CAPS = (None, None)
    GGUF = GemmaGGUF("gemma3", attention_bias=False)
    STORED = TEXT_PART

    @classmethod
    def rope(cls, d: Mapping[str, Any], positions: int, where: str) -> Rope:
        return _rope_of(d, FULL, "rope_theta", cls.THETA, positions, where)

    @classmethod
    def own_fields(cls, d: Mapping[str, Any], where: str) -> dict[str, Any]:
        if d.get("attn_logit_softcapping") is not None:
            raise UserError(
                f"attn_logit_softcapping in {where} is not supported for {d['model_type']}: transformers ignores it."
            )
        local = _rope_of(d, SLIDING, "rope_local_base_freq", 1e4, cls.POSITIONS, where)
        local_fields = {"local_rope_theta": local.theta, "local_rope_scaling": local.scaling}
        return super().own_fields(d, where) | local_fields

    def tables(self) -> list[RopeTable]:
        return [self._rope, self._local]

    @property
    def _local(self) -> RopeTable:
        return RopeTable(self.rotary_dim, self.local_rope_theta, self.local_rope_scaling)

    def _attention(self, index: int) -> Attention:
        usual = super()._attention(index)
        return usual if self.sliding_windows[index] is None else replace(usual, rope=self._local)


class Gemma3(TextPart, Gemma3Text):
    TRANSFORMERS = "Gemma3ForConditionalGeneration"
    TEXT_TYPES = ("gemma3_text",)
    # Published files state only what differs from these.
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }


def _rope_of(d: Mapping[str, Any], kind: str, theta: str, default: float, positions: int, where: str) -> Rope:
    """The rope parameters of a kind of layers: in rope_parameters by kind or, in earlier files, in separate fields, of
    which rope_scaling is for full attention only. Raises UserError."""
    parameters = d.get("rope_parameters") or {}
    fields = rope_fields({"rope_parameters": parameters}, where)
    by_kind = {name: value for name, value in fields.items() if value is not None}
    if by_kind and not by_kind.keys() <= {FULL, SLIDING}:
        raise UserError(f"rope_parameters in {where} must be by kind of layer, {FULL} and {SLIDING}: correct the file.")
    result = by_kind.get(kind, {})
    if not isinstance(result, Mapping):
        raise UserError(f"rope_parameters.{kind} in {where} is {result!r:.60}, expected an object: correct the file.")
    earlier = rope_fields({"rope_scaling": d.get("rope_scaling")}, where) if kind == FULL else {}
    rope = {"rope_theta": d.get(theta, default), **result, **earlier}
    return parse_rope({**d, "rope_parameters": rope, "rope_scaling": None}, positions, where, default)
