"""The gated MLP: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

from __future__ import annotations

from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.block import Block
from wgpu_lora.ops.elementwise import swiglu


def gated_mlp(block: Block, x: Tensor, inner: int, onto: Tensor | None = None, name: str = "mlp") -> Tensor:
    """Records x [T, hidden_size] -> [T, hidden_size], added to `onto` if given, in row blocks if T x inner is large."""
    y = onto or block.rec.temp(x.shape, name="mlp")
    for start, stop in block.rec.row_blocks(x.shape[0], inner):
        rows = x.rows(start, stop)
        gate, up = (block.project(rows, f"{name}.{module}", None, start) for module in ("gate_proj", "up_proj"))
        activated = swiglu(block.rec, gate, up)
        block.project(activated, f"{name}.down_proj", y.rows(start, stop), start, accumulate=onto is not None)
    return y
