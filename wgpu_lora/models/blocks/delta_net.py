"""The gated delta net (Yang et al. 2024), as in Qwen3.5: attention whose state is a matrix of fixed size per head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from wgpu_lora.formats.gguf.gguf_layout import Layout, Tiled
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.kv_cache import CacheTensor
from wgpu_lora.models.layer_context import LayerContext
from wgpu_lora.models.model_config import KEPT, MATRIX, Parameter
from wgpu_lora.models.row_inputs import NOWHERE, Rows
from wgpu_lora.ops.attention.delta_net.causal_conv import causal_conv
from wgpu_lora.ops.attention.delta_net.delta_rule import gated_delta_rule
from wgpu_lora.ops.attention.delta_net.delta_step import gated_delta_step, possible_slices
from wgpu_lora.ops.norm import gated_norm, l2norm

L2_EPS = 1e-6


@dataclass(frozen=True)
class Runs:
    """u32 [T, 4]: for each row, how many rows of its sequence are before it in the batch, and how many from it on; the
    index of the sequence; and whether that has tokens before the batch."""

    @property
    def width(self) -> int:
        return 4

    def values(self, rows: Rows) -> np.ndarray:
        index = np.arange(rows.positions.size)
        begins = rows.previous < 0
        first = np.maximum.accumulate(np.where(begins, index, 0))
        stop = np.append(np.flatnonzero(begins), index.size)[np.cumsum(begins)]
        return np.stack([index - first, stop - index, rows.sequences, rows.positions[first] > 0], axis=1)

    def padding(self, values: np.ndarray) -> np.ndarray:
        return np.array([0, 1, NOWHERE, 0])  # a sequence of one row each, without a state


@dataclass(frozen=True)
class DeltaNet:
    """The modules in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, conv1d, norm and out_proj of `name`.

    Args:
        taps: rows that the convolution sees.
        eps: of the norm of each head's output.
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    name: str = "linear_attn"

    @property
    def columns(self) -> int:
        """q, k and v of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def parameters(self) -> dict[str, Parameter]:
        hidden, heads, values = self.hidden_size, self.value_heads, self.value_heads * self.value_dim
        order = Tiled(self.key_heads, heads)
        dealt, mixed = Layout(order), Layout(replace(order, start=2 * self.key_heads * self.key_dim))
        result = {
            "dt_bias": Parameter((heads,), gguf="ssm_dt.bias", gguf_layout=dealt),
            "A_log": Parameter((heads,), gguf="ssm_a", gguf_layout=Layout(order, negative_exp=True)),
            "conv1d.weight": Parameter((self.columns, 1, self.taps), gguf="ssm_conv1d", gguf_layout=mixed),
            "norm.weight": Parameter((self.value_dim,), gguf="ssm_norm"),
            "in_proj_qkv.weight": Parameter((self.columns, hidden), MATRIX, True, "attn_qkv", mixed),
            "in_proj_z.weight": Parameter((values, hidden), MATRIX, True, "attn_gate", dealt),
            "in_proj_b.weight": Parameter((heads, hidden), KEPT, True, "ssm_beta", dealt),
            "in_proj_a.weight": Parameter((heads, hidden), KEPT, True, "ssm_alpha", dealt),
            "out_proj.weight": Parameter((hidden, values), MATRIX, True, "ssm_out", Layout(columns=order)),
        }
        return {f"{self.name}.{name}": item for name, item in result.items()}

    def stacks(self) -> tuple[tuple[str, ...], ...]:
        """The modules that read the same x, by their formats."""
        pairs = ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")
        return tuple(tuple(f"{self.name}.{module}" for module in pair) for pair in pairs)

    def cache(self) -> dict[str, CacheTensor]:
        """Of each sequence, the last inputs of the convolution, and the matrices."""
        matrices = CacheTensor((self.value_heads, self.key_dim, self.value_dim), per_sequence=True)
        return {"inputs": CacheTensor((self.taps - 1, self.columns), per_sequence=True), "state": matrices}

    def record(self, block: LayerContext, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Records x [T, hidden_size] -> [T, hidden_size], added to `onto` if given."""
        rec, rows, vectors = block.rec, x.shape[0], block.layer.vectors
        runs = block.inputs.rows[Runs()]
        (mixed, z), (b, a) = (block.linears(x, modules) for modules in self.stacks())
        conv, a_log, dt_bias, norm = (
            vectors[f"{self.name}.{name}"] for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
        )
        cache = block.cache.tensors if block.cache else {}
        fits = bool(possible_slices(self.key_dim, self.value_dim))
        if cache and rec.program.decoding and fits:  # a token of each sequence
            frozen, of_sequences = (conv, a_log, dt_bias, norm), (cache["inputs"], cache["state"])
            y = gated_delta_step(rec, mixed, z, a, b, frozen, runs, *of_sequences, self.key_heads, L2_EPS, self.eps)
        else:
            keys, values = (rows, self.key_heads, self.key_dim), (rows, self.value_heads, self.value_dim)
            q, k, v = causal_conv(rec, mixed, conv, runs, (keys, keys, values), cache.get("inputs"))
            q, k = l2norm(rec, q, k, self.key_dim**-0.5, L2_EPS)
            y = gated_delta_rule(rec, q, k, v, a, b, a_log, dt_bias, runs, cache.get("state"))
            y = gated_norm(rec, y, z, norm, self.eps)
        return block.linear(y, f"{self.name}.out_proj", onto, accumulate=onto is not None)
