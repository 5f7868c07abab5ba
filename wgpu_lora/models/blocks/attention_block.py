"""Causal grouped-query attention with rotary embedding and an optional sliding window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.kv_cache import CacheTensor
from wgpu_lora.models.layer_context import LayerContext
from wgpu_lora.models.rotary_embedding import RopeTable
from wgpu_lora.models.row_inputs import Rows
from wgpu_lora.ops.attention.attention import attention
from wgpu_lora.ops.attention.attention_gate import gated, query_part
from wgpu_lora.ops.attention.rope import Appending, HeadNorm, rope
from wgpu_lora.ops.elementwise import split_columns


@dataclass(frozen=True)
class KeyRanges:
    """Key ranges, u32 [T, 4] (see `ops.attention`): a row sees all keys up to itself, or the last `window` of them."""

    window: int | None = None

    @property
    def width(self) -> int:
        return 4

    def values(self, rows: Rows) -> np.ndarray:
        first, last = rows.first, rows.last_viewer
        if self.window is not None:
            first = np.maximum(first, rows.keys - self.window + 1)
            last = np.minimum(last, rows.keys + self.window)
        return np.stack([first, rows.stop, last, rows.first_viewer], axis=1)

    def padding(self, values: np.ndarray) -> np.ndarray:
        # Padding sees no keys. Its empty range starts where the last row's does, because a subgroup visits all keys
        # between the smallest start and the largest end of its rows, which should not be the whole cache.
        return np.array([values[-1, 0], values[-1, 0], 0, 0])


@dataclass(frozen=True)
class Attention:
    """Attention with the modules q_proj, k_proj, v_proj and o_proj of `name`, and RoPE on q and k.

    fused: the number of heads if one module, qkv_proj, has the rows of q, k and v.

    qk_eps: epsilon of q_norm and k_norm over each head; None if the model does not have them.
    turns: whether q and k are rotated. query_rope: the table of q, if it has another one.
    scale: of the scores, by default head_dim^-0.5. cap: their soft cap, 0 for none.
    """

    num_key_value_heads: int
    head_dim: int
    window: int | None
    rope: RopeTable
    qk_eps: float | None = None
    name: str = "self_attn"
    turns: bool = True
    fused: int | None = None
    scale: float | None = None
    cap: float = 0.0
    query_rope: RopeTable | None = None

    def cache(self) -> dict[str, CacheTensor]:
        """Rotated keys, and values."""
        tensor = CacheTensor((self.num_key_value_heads, self.head_dim))
        return {"keys": tensor, "values": tensor}

    def stack(self) -> tuple[str, ...]:
        """The modules that read the same x."""
        return () if self.fused else tuple(f"{self.name}.{module}" for module in ("q_proj", "k_proj", "v_proj"))

    def record(self, block: LayerContext, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Records x [T, hidden_size] -> [T, hidden_size], added to `onto` if given."""
        y = self.attend(block, *self._project(block, x))
        y = y.reshape(y.shape[0], y.shape[1] * y.shape[2])
        return block.linear(y, f"{self.name}.o_proj", onto, accumulate=onto is not None)

    def attend(self, block: LayerContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Records the heads' outputs [T, heads, head_dim] from q, and k and v [T, kv_heads, head_dim] (see `rope`)."""
        rec, inputs, norm = block.rec, block.inputs, None
        if self.qk_eps is not None:
            q_norm, k_norm = (block.layer.vectors[f"{self.name}.{name}.weight"] for name in ("q_norm", "k_norm"))
            norm = HeadNorm(q_norm, k_norm, self.qk_eps)
        cache = Appending(*block.cache.token_tensors("keys", "values")) if block.cache else None
        table_rows = inputs.rows[self.rope.table_rows] if self.rope.table_rows else inputs.positions
        table, of_q = inputs.tables[self.rope], inputs.tables[self.query_rope] if self.query_rope else None
        q, k, v = rope(rec, (q, k, v), table_rows, table, norm, cache, self.turns, of_q)
        ranges = inputs.rows[KeyRanges(self.window)]
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        blocks = block.cache.blocks if block.cache else None
        return attention(rec, q, k, v, ranges, self.num_key_value_heads, scale, self.cap, blocks)

    def _project(self, block: LayerContext, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, heads, head_dim], and k and v [T, kv_heads, head_dim], in one storage if it fits a binding."""
        parts = self._split(block, x, self.fused) if self.fused else block.linears(x, self.stack())
        q, k, v = (part.reshape(part.shape[0], part.shape[1] // self.head_dim, self.head_dim) for part in parts)
        return q, k, v

    def _split(self, block: LayerContext, x: Tensor, heads: int) -> list[Tensor]:
        """q, k and v of one matrix, in blocks of rows and a storage each if they exceed a binding."""
        rec, rows = block.rec, x.shape[0]
        widths = [count * self.head_dim for count in (heads, self.num_key_value_heads, self.num_key_value_heads)]
        blocks, shapes = list(rec.row_blocks(rows, sum(widths))), [(rows, width) for width in widths]
        if len(blocks) == 1 or block.cache:
            parts = rec.temps(*shapes, name="q, k and v")
        else:
            parts = [rec.temp(shape, name=name) for shape, name in zip(shapes, "qkv", strict=True)]
        for start, stop in blocks:
            all_rows = len(blocks) == 1
            qkv = block.linear(x.rows(start, stop), f"{self.name}.qkv_proj", first_row=None if all_rows else start)
            split_columns(rec, qkv, parts if all_rows else [part.rows(start, stop) for part in parts])
        return parts


@dataclass(frozen=True)
class GatedAttention(Attention):
    """q_proj has a query and a gate [2, head_dim] for each head; o_proj reads the head's output times sigmoid(gate)."""

    def record(self, block: LayerContext, x: Tensor, onto: Tensor | None = None) -> Tensor:
        query_gate, k, v = block.linears(x, self.stack())
        heads = query_gate.shape[1] // (2 * self.head_dim)
        q = query_part(block.rec, query_gate, heads)
        k, v = (part.reshape(part.shape[0], self.num_key_value_heads, self.head_dim) for part in (k, v))
        y = gated(block.rec, self.attend(block, q, k, v), query_gate)
        return block.linear(y, f"{self.name}.o_proj", onto, accumulate=onto is not None)
