"""Attention whose heads are multiplied by gates, which q_proj computes beside the queries (Qiu et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.block import Block
from wgpu_lora.models.blocks.attention import Attention
from wgpu_lora.ops.head_gate import gated, query_part


@dataclass(frozen=True)
class GatedAttention(Attention):
    """q_proj has a query and a gate [2, head_dim] for each head; o_proj reads the head's output times sigmoid(gate)."""

    def record(self, block: Block, x: Tensor, onto: Tensor | None = None) -> Tensor:
        both, k, v = block.projects(x, self.stack())
        heads = both.shape[1] // (2 * self.head_dim)
        q = query_part(block.rec, both, heads)
        k, v = (part.reshape(part.shape[0], self.num_key_value_heads, self.head_dim) for part in (k, v))
        y = gated(block.rec, self.attend(block, q, k, v), both)
        return block.project(y, f"{self.name}.o_proj", onto, accumulate=onto is not None)
