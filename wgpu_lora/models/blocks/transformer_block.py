"""The common decoder: attention with RoPE, then a gated MLP, each after an RMSNorm and with a residual connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_layout import PLAIN_LAYOUT, InterleavedHalves, Layout
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.blocks.attention_block import Attention, KeyRanges
from wgpu_lora.models.config_fields import boolean, whole
from wgpu_lora.models.kv_cache import CacheTensor
from wgpu_lora.models.layer_context import LayerContext
from wgpu_lora.models.model_config import BIAS, MATRIX, ModelConfig, Parameter
from wgpu_lora.models.rotary_embedding import (
    DEFAULT_THETA,
    LongRopeScaling,
    Rope,
    RopeScaling,
    RopeTable,
    check_pairs,
    parse_rope,
    rope_table,
    rotary_dim,
)
from wgpu_lora.models.row_inputs import RowInput
from wgpu_lora.ops.elementwise import geglu, residual, split_columns, swiglu

ATTENTION_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"


Linears = tuple[tuple[str, tuple[int, int], bool, str, Layout], ...]  # module, shape, bias, its form in GGUF


class Biases(NamedTuple):
    """Which linear layers have biases: q, k and v; o; those of the MLP."""

    attention: bool = False
    output: bool = False
    mlp: bool = False


class Mixer(Protocol):
    """The part of a layer that mixes the tokens of a sequence: attention or a delta net."""

    def record(self, block: LayerContext, x: Tensor, onto: Tensor | None = None) -> Tensor: ...

    def cache(self) -> Mapping[str, CacheTensor]: ...


@dataclass(frozen=True, kw_only=True)
class Transformer(ModelConfig):
    """The config of the common decoder. Subclasses define how config.json is read.

    attention_bias: whether q, k and v have biases. attention_output_bias: whether o has.
    sliding_windows: one entry per layer; None attends to all previous tokens, w to the last w, including the current
        one.
    rotated_layers: one entry per layer, or none if all have rotary embedding.
    """

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    partial_rotary_factor: float = 1.0
    rotated_layers: tuple[bool, ...] = ()

    LAYER_PARTS: ClassVar[Mapping[str, tuple[str, ...]]] = {"mlp": ("mlp",), "attention": ("self_attn",)}
    MODULES: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    # Which of config.json's biases the class in transformers reads. A file that sets another is refused, because
    # transformers would ignore it.
    READS_BIASES: ClassVar[Biases] = Biases()
    QK_NORM: ClassVar[bool] = False
    FUSED: ClassVar[bool] = False  # q, k and v are one matrix, and gate and up are one
    HEAD_DIM: ClassVar[int | None] = None  # default of head_dim; None: hidden_size / heads
    THETA: ClassVar[float] = DEFAULT_THETA  # default of rope_theta
    PARTIAL: ClassVar[float | None] = None  # default of partial_rotary_factor; None: whole heads are always rotated
    GROUPED: ClassVar[bool] = True  # num_key_value_heads is required
    # Whether llama.cpp rotates the pairs (x[2i], x[2i + 1]) instead of transformers' (x[i], x[i + head_dim / 2]).
    GGUF_INTERLEAVES: ClassVar[bool] = False

    # -- config.json -----------------------------------------------------------------------------------------------

    @classmethod
    def biases(cls, d: Mapping[str, Any], where: str) -> Biases:
        """Which linear layers have biases."""
        attention = boolean(d, "attention_bias", where)
        return Biases(attention, attention, boolean(d, "mlp_bias", where))

    @classmethod
    def rope(cls, d: Mapping[str, Any], positions: int, where: str) -> Rope:
        return parse_rope(d, positions, where, cls.THETA, cls.PARTIAL)

    @classmethod
    def window(cls, d: Mapping[str, Any], where: str) -> int | None:
        """The sliding window of the layers that have one; None if no layer has."""
        return None

    @classmethod
    def windows(cls, d: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
        """The sliding window of each layer, as transformers' configuration classes resolve it."""
        window = cls.window(d, where)
        types = d.get("layer_types")
        if types is None:
            first = whole(d, "max_window_layers", where, 28, minimum=0)
            return tuple(window if layer >= first else None for layer in range(layers))
        return tuple(
            window if kind == "sliding_attention" else None for kind in layer_types(types, window, layers, where)
        )

    @classmethod
    def parse(cls, d: Mapping[str, Any], where: str) -> Self:
        cls._refuse(d, where)
        facts = cls.common(d, where)
        hidden, heads = facts["hidden_size"], whole(d, "num_attention_heads", where)
        head_dim = cls._head_dim(d, hidden, heads, where)
        rope = cls.rope(d, facts["max_position_embeddings"], where)
        check_pairs(head_dim, rope.partial, where)
        biases = cls.biases(d, where)
        return cls(
            **facts,
            **cls.own_fields(d, where),
            intermediate_size=whole(d, "intermediate_size", where),
            num_attention_heads=heads,
            num_key_value_heads=cls._kv_heads(d, heads, where),
            head_dim=head_dim,
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            partial_rotary_factor=rope.partial,
            attention_bias=biases.attention,
            attention_output_bias=biases.output,
            mlp_bias=biases.mlp,
            qk_norm=cls.QK_NORM,
            sliding_windows=cls.windows(d, facts["num_hidden_layers"], where),
        )

    @classmethod
    def own_fields(cls, d: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The fields that a subclass adds, read from config.json. Raises UserError."""
        return {}

    @classmethod
    def _refuse(cls, d: Mapping[str, Any], where: str) -> None:
        act = d.get("hidden_act", "silu")
        if act != "silu":
            raise UserError(f"hidden_act {act!r} in {where} is not supported: use a model with 'silu'.")
        for name, read in (("attention_bias", cls.READS_BIASES.attention), ("mlp_bias", cls.READS_BIASES.mlp)):
            if boolean(d, name, where) and not read:
                raise UserError(f"{name} = true in {where} is not supported for {d['model_type']}: use another model.")

    @classmethod
    def _kv_heads(cls, d: Mapping[str, Any], heads: int, where: str) -> int:
        name = "num_key_value_heads"
        unset = d.get(name) is None and (name in d or not cls.GROUPED)
        kv_heads = heads if unset else whole(d, name, where)
        if heads % kv_heads:
            raise UserError(
                f"num_attention_heads {heads} in {where} is not a multiple of {name} {kv_heads}: correct it."
            )
        return kv_heads

    @classmethod
    def _head_dim(cls, d: Mapping[str, Any], hidden: int, heads: int, where: str) -> int:
        if d.get("head_dim") is not None:
            head_dim = whole(d, "head_dim", where)
        elif cls.HEAD_DIM is not None and "head_dim" not in d:
            head_dim = cls.HEAD_DIM
        elif hidden % heads:
            raise UserError(
                f"hidden_size {hidden} in {where} is not a multiple of num_attention_heads {heads}: correct it."
            )
        else:
            head_dim = hidden // heads
        if head_dim % 2:
            raise UserError(
                f"head_dim {head_dim} in {where} is odd, but rotary embedding needs pairs: use another model."
            )
        return head_dim

    # -- layers ----------------------------------------------------------------------------------------------------

    def layer(self, index: int) -> dict[str, Parameter]:
        hidden, inner, kv_heads = self.hidden_size, self.intermediate_size, self.num_key_value_heads
        q, kv = self.num_attention_heads * self.head_dim, kv_heads * self.head_dim
        turned, kv_turned = PLAIN_LAYOUT, PLAIN_LAYOUT
        if self.GGUF_INTERLEAVES:
            turned, kv_turned = Layout(InterleavedHalves(self.num_attention_heads)), Layout(InterleavedHalves(kv_heads))
        result = {f"{ATTENTION_NORM}.weight": Parameter((hidden,), gguf="attn_norm")}
        qkv: Linears = (
            ("self_attn.q_proj", (q, hidden), self.attention_bias, "attn_q", turned),
            ("self_attn.k_proj", (kv, hidden), self.attention_bias, "attn_k", kv_turned),
            ("self_attn.v_proj", (kv, hidden), self.attention_bias, "attn_v", PLAIN_LAYOUT),
        )
        gate_up: Linears = (
            ("mlp.gate_proj", (inner, hidden), self.mlp_bias, "ffn_gate", PLAIN_LAYOUT),
            ("mlp.up_proj", (inner, hidden), self.mlp_bias, "ffn_up", PLAIN_LAYOUT),
        )
        if self.FUSED:
            qkv = (("self_attn.qkv_proj", (q + 2 * kv, hidden), self.attention_bias, "attn_qkv", PLAIN_LAYOUT),)
            gate_up = (("mlp.gate_up_proj", (2 * inner, hidden), self.mlp_bias, "ffn_up", PLAIN_LAYOUT),)
        for module, shape, bias, gguf, layout in (
            *qkv,
            ("self_attn.o_proj", (hidden, q), self.attention_output_bias, "attn_output", PLAIN_LAYOUT),
            *gate_up,
            ("mlp.down_proj", (hidden, inner), self.mlp_bias, "ffn_down", PLAIN_LAYOUT),
        ):
            result[f"{module}.weight"] = Parameter(shape, MATRIX, True, gguf, layout)
            if bias:
                result[f"{module}.bias"] = Parameter(shape[:1], BIAS, gguf=gguf, gguf_layout=layout)
        if self.qk_norm:
            result["self_attn.q_norm.weight"] = Parameter((self.head_dim,), gguf="attn_q_norm")
            result["self_attn.k_norm.weight"] = Parameter((self.head_dim,), gguf="attn_k_norm")
        result[f"{MLP_NORM}.weight"] = Parameter((hidden,), gguf="ffn_norm")
        return result

    def stacks(self, index: int) -> Sequence[Sequence[str]]:
        stacks = self._attention(index).stack(), self._mlp.stack()
        return [stack for stack in stacks if stack]

    def block(self, block: LayerContext, index: int, x: Tensor) -> Tensor:
        rec, eps, mixer = block.rec, self.rms_norm_eps, self._mixer(index)
        if not rec.training:  # x is not needed again, so the residual is added in place
            mixer.record(block, block.norm(x, ATTENTION_NORM, eps), x)
            return self._mlp.record(block, block.norm(x, MLP_NORM, eps), x)
        attended = mixer.record(block, block.norm(x, ATTENTION_NORM, eps))
        x, normed = block.residual_norm(x, attended, MLP_NORM, eps)
        return residual(rec, x, self._mlp.record(block, normed))

    def cache(self, index: int) -> Mapping[str, CacheTensor]:
        return self._mixer(index).cache()

    def row_inputs(self) -> Sequence[RowInput]:
        table_rows = [table.table_rows for table in self.tables() if table.table_rows]
        return [*(KeyRanges(window) for window in sorted(set(self.sliding_windows), key=lambda w: w or 0)), *table_rows]

    def longest_fork(self) -> int | None:
        bounds = (*self.sliding_windows, self.switch())
        return min((bound for bound in bounds if bound is not None), default=None)

    def switch(self) -> int | None:
        long = isinstance(self.rope_scaling, LongRopeScaling)
        return self.rope_scaling.original_max_position_embeddings if self.rope_scaling and long else None

    def tables(self) -> Sequence[RopeTable]:
        return [self._rope]

    def cut(self, layers: int) -> Self:
        windows, rotated = self.sliding_windows[:layers], self.rotated_layers[:layers]
        return replace(self, num_hidden_layers=layers, sliding_windows=windows, rotated_layers=rotated)

    @property
    def rotary_dim(self) -> int:
        """The values of a head that are rotated."""
        return rotary_dim(self.head_dim, self.partial_rotary_factor)

    @cached_property
    def _rope(self) -> RopeTable:
        return rope_table(self)

    @property
    def _mlp(self) -> GatedMLP:
        return GatedMLP(self.intermediate_size, self.FUSED)

    def _mixer(self, index: int) -> Mixer:
        return self._attention(index)

    def _attention(self, index: int) -> Attention:
        eps, window = self.rms_norm_eps if self.qk_norm else None, self.sliding_windows[index]
        turns = not self.rotated_layers or self.rotated_layers[index]
        fused = self.num_attention_heads if self.FUSED else None
        return Attention(self.num_key_value_heads, self.head_dim, window, self._rope, eps, turns=turns, fused=fused)


def window_size(d: Mapping[str, Any], where: str) -> int | None:
    """sliding_window: 4,096 if it is missing, None if it is null."""
    return whole(d, "sliding_window", where, 4096) if d.get("sliding_window", 4096) is not None else None


def layer_types(types: Any, window: int | None, layers: int, where: str) -> list[str]:
    """Returns `types`, config.json's layer_types, once checked."""
    if not isinstance(types, list) or len(types) != layers:
        raise UserError(f"layer_types in {where} must list {layers} layers (num_hidden_layers): correct the file.")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UserError(
                f"layer_types in {where} has {kind!r:.100}, which is not supported: only full and sliding "
                "attention are."
            )
        if kind == "sliding_attention" and window is None:
            raise UserError(f"layer_types in {where} has sliding_attention but no sliding_window is set: correct it.")
    return types


@dataclass(frozen=True)
class GatedMLP:
    """The modules gate_proj, up_proj and down_proj of `name`; or gate_up_proj, which has the rows of both, if `fused`.

    inner: values between the matrices. gelu: GELU in its form by tanh instead of SiLU.
    """

    inner: int
    fused: bool = False
    gelu: bool = False
    name: str = "mlp"

    def stack(self) -> tuple[str, ...]:
        """The modules that read the same x."""
        return () if self.fused else (f"{self.name}.gate_proj", f"{self.name}.up_proj")

    def record(self, block: LayerContext, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Records x [T, hidden_size] -> [T, hidden_size], added to `onto` if given, in row blocks if it is large."""
        y = onto or block.rec.temp(x.shape, name="mlp")
        for start, stop in block.rec.row_blocks(x.shape[0], 2 * self.inner):  # gate and up are in one storage
            rows = x.rows(start, stop)
            if self.fused:
                activated = self._fused(block, rows, start)
            else:
                activated = block.gated(rows, self.stack(), start, self.gelu)
            block.linear(activated, f"{self.name}.down_proj", y.rows(start, stop), start, accumulate=onto is not None)
        return y

    def _fused(self, block: LayerContext, x: Tensor, first_row: int) -> Tensor:
        gate_up = block.linear(x, f"{self.name}.gate_up_proj", first_row=first_row)
        parts = block.rec.temps(*[(x.shape[0], self.inner)] * 2, name="gate and up")
        split_columns(block.rec, gate_up, parts)
        return (geglu if self.gelu else swiglu)(block.rec, *parts)
