"""Qwen3.5: three of four layers are gated delta nets, the others gated attention; the text part alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from gguf import GGUFWriter

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_header import Header
from wgpu_lora.formats.safetensors_checkpoint import TensorNames
from wgpu_lora.models.blocks.attention_block import GatedAttention
from wgpu_lora.models.blocks.delta_net import L2_EPS, DeltaNet, Runs
from wgpu_lora.models.blocks.transformer_block import MLP_NORM, Mixer, Transformer
from wgpu_lora.models.blocks.transformer_gguf import TransformerGGUF
from wgpu_lora.models.config_fields import whole
from wgpu_lora.models.model_config import VECTOR, Parameter
from wgpu_lora.models.row_inputs import RowInput

# Of the rotated pairs, those that turn with time, height and width in images. For text all turn with the position.
_SECTIONS = [11, 11, 10, 0]
_SIZES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_RECURRENT = "attention.recurrent_layers"


class DeltaGGUF(TransformerGGUF):
    def fields(self, header: Header) -> dict[str, Any] | None:
        d = super().fields(header)
        if d is None:
            return None
        blocks = d["num_hidden_layers"]
        d["num_hidden_layers"] = layers = blocks - self._predicting(header)
        for name, key in _SIZES.items():
            d[name] = self._required(header, key)
        inner, heads = self._required(header, "ssm.inner_size"), d["linear_num_value_heads"]
        if not isinstance(inner, int) or not isinstance(heads, int) or heads < 1 or inner % heads:
            raise UserError(
                f"{self.name}.ssm.inner_size {inner!r:.100} in {header.path} is not a multiple of "
                f"{self.name}.ssm.time_step_rank {heads!r:.100}: use another conversion of the model."
            )
        d["linear_value_head_dim"] = inner // heads
        rotated = self._number(header, "rope.dimension_count", d["head_dim"])
        d["rope_parameters"]["partial_rotary_factor"] = rotated / d["head_dim"] if d["head_dim"] else 1.0
        kinds = header.numbers(f"{self.name}.{_RECURRENT}", blocks)
        if kinds is None:
            d["full_attention_interval"] = self._number(header, "full_attention_interval", 4)
        else:
            layer_types = ["linear_attention" if kind else "full_attention" for kind in kinds.tolist()]
            d["layer_types"] = layer_types[: int(layers)]
        return d

    def rotated(self, header: Header, head_dim: Any) -> Any:
        return head_dim  # a part of it, which `fields` reads

    def ignored_tensors(self, header: Header) -> str:
        """The layer that predicts a further token, if there is one."""
        blocks, predicting = self._required(header, "block_count"), self._predicting(header)
        layers = "|".join(str(layer) for layer in range(blocks - predicting, blocks))
        return rf"blk\.(?:{layers})\..*" if layers else ""

    def _predicting(self, header: Header) -> int:
        count = self._number(header, "nextn_predict_layers", 0)
        if count not in (0, 1):
            raise UserError(
                f"{self.name}.nextn_predict_layers in {header.path} is {count!r:.100}, expected 0 or 1: use another "
                "conversion of the model."
            )
        return int(count)

    def unsupported_feature(self, config: Any) -> str | None:
        keys, values = config.linear_key_head_dim, config.linear_value_head_dim
        if keys != values:
            return f"keys of {keys} and values of {values} in its delta nets"
        if config.rms_norm_eps != L2_EPS:
            return f"an rms_norm_eps of {config.rms_norm_eps:g}, which is also that of the keys' norms"
        return super().unsupported_feature(config)

    def write(self, config: Any, writer: GGUFWriter) -> None:
        super().write(config, writer)
        for name, key in _SIZES.items():
            writer.add_uint32(f"{self.name}.{key}", getattr(config, name))
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_rope_dimension_sections(_SECTIONS)
        period = interval(config.linear_layers)
        if period is None:
            writer.add_array(f"{self.name}.{_RECURRENT}", list(config.linear_layers))
        else:
            writer.add_full_attention_interval(period)


def interval(linear: tuple[bool, ...]) -> int | None:
    """Every how many layers there is one that is no delta net; None if they are in another order."""
    period = linear.index(False) + 1 if False in linear else len(linear) + 1
    return period if all(kind == ((layer + 1) % period != 0) for layer, kind in enumerate(linear)) else None


FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class Qwen35Text(Transformer):
    """linear_layers: one entry per layer, whether it is a delta net."""

    linear_layers: tuple[bool, ...]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int

    POSITIONS = 32768
    TRANSFORMERS = "Qwen3_5ForCausalLM"
    QK_NORM = True
    HEAD_DIM = 256
    GGUF = DeltaGGUF("qwen35", attention_bias=False, pretokenizer="qwen35")
    PARTIAL = 0.25
    NORM_OFFSET = 1.0
    LAYER_PARTS: ClassVar[Mapping[str, tuple[str, ...]]] = {"mlp": ("mlp",), "attention": ("self_attn", "linear_attn")}
    MODULES: ClassVar[tuple[str, ...]] = (
        *Transformer.MODULES,
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_b",
        "in_proj_a",
        "out_proj",
    )
    STORED: ClassVar[TensorNames] = TensorNames((("model.language_model.", "model."),), ("mtp.", "model.visual."))
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }

    @classmethod
    def windows(cls, d: Mapping[str, Any], layers: int, where: str) -> tuple[None, ...]:
        return (None,) * layers

    @classmethod
    def own_fields(cls, d: Mapping[str, Any], where: str) -> dict[str, Any]:
        sizes = {name: whole(d, name, where) for name in cls.DEFAULTS}
        keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
        if values % keys:
            raise UserError(
                f"linear_num_value_heads {values} in {where} is not a multiple of linear_num_key_heads {keys}: "
                "correct it."
            )
        for name in ("linear_key_head_dim", "linear_value_head_dim"):
            if sizes[name] % 4:
                raise UserError(f"{name} {sizes[name]} in {where} is not a multiple of 4: use another model.")
        if sizes["linear_conv_kernel_dim"] < 2:
            raise UserError(f"linear_conv_kernel_dim in {where} is 1, expected 2 to 8: correct the file.")
        return {"linear_layers": linear_layers(d, whole(d, "num_hidden_layers", where), where), **sizes}

    # -- layers ----------------------------------------------------------------------------------------------------

    def layer(self, index: int) -> dict[str, Parameter]:
        result = super().layer(index)
        result = {name: replace(item, offset=1.0) if item.kind == VECTOR else item for name, item in result.items()}
        result[f"{MLP_NORM}.weight"] = replace(result[f"{MLP_NORM}.weight"], gguf="post_attention_norm")
        name = "self_attn.q_proj.weight"
        if not self.linear_layers[index]:
            out, hidden = result[name].shape
            return {**result, name: replace(result[name], shape=(2 * out, hidden))}
        remaining = {name: item for name, item in result.items() if not name.startswith("self_attn.")}
        return self._delta_net().parameters() | remaining

    def stacks(self, index: int) -> Sequence[Sequence[str]]:
        *_, mlp = super().stacks(index)
        mixer = self._delta_net().stacks() if self.linear_layers[index] else (self._attention(index).stack(),)
        return *mixer, mlp

    def row_inputs(self) -> Sequence[RowInput]:
        return [*super().row_inputs(), Runs()]

    def longest_fork(self) -> int | None:
        return 0  # the state of a delta net goes from row to row

    def cut(self, layers: int) -> Self:
        return replace(super().cut(layers), linear_layers=self.linear_layers[:layers])

    def _mixer(self, index: int) -> Mixer:
        return self._delta_net() if self.linear_layers[index] else self._attention(index)

    def _attention(self, index: int) -> GatedAttention:
        return GatedAttention(self.num_key_value_heads, self.head_dim, None, self._rope, self.rms_norm_eps)

    def _delta_net(self) -> DeltaNet:
        return DeltaNet(
            self.hidden_size,
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
            self.rms_norm_eps,
        )


class Qwen35(Qwen35Text):
    """With a vision tower, which is left out, as is the head that predicts several tokens.

    Modules have the names of the class that AutoModelForCausalLM makes of the whole's config.json: the text part's."""

    TEXT_TYPES = ("qwen3_5_text",)


def linear_layers(d: Mapping[str, Any], layers: int, where: str) -> tuple[bool, ...]:
    """Which layers are delta nets: layer_types, or all but every full_attention_interval-th. Raises UserError."""
    types = d.get("layer_types")
    if types is None:
        period = whole(d, "full_attention_interval", where, 4)
        return tuple((layer + 1) % period != 0 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise UserError(f"layer_types in {where} must list {layers} layers (num_hidden_layers): correct the file.")
    for kind in types:
        if kind not in (FULL, LINEAR):
            raise UserError(
                f"layer_types in {where} has {kind!r:.100}, which is not supported: only {FULL} and {LINEAR} are."
            )
    return tuple(kind == LINEAR for kind in types)
