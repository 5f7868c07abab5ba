"""The gated MLP: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

from __future__ import annotations

from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.block import Block


def gated_stack(name: str = "mlp") -> tuple[str, str]:
    """The modules that read the same x."""
    return f"{name}.gate_proj", f"{name}.up_proj"


def gated_mlp(block: Block, x: Tensor, inner: int, onto: Tensor | None = None, name: str = "mlp") -> Tensor:
    """Records x [T, hidden_size] -> [T, hidden_size], added to `onto` if given, in row blocks if it is large."""
    y = onto or block.rec.temp(x.shape, name="mlp")
    for start, stop in block.rec.row_blocks(x.shape[0], 2 * inner):  # gate and up are in one storage
        activated = block.gated(x.rows(start, stop), gated_stack(name), start)
        block.project(activated, f"{name}.down_proj", y.rows(start, stop), start, accumulate=onto is not None)
    return y
