"""The gated MLP: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.block import Block
from wgpu_lora.ops.columns import split_columns
from wgpu_lora.ops.elementwise import geglu, swiglu


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

    def record(self, block: Block, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Records x [T, hidden_size] -> [T, hidden_size], added to `onto` if given, in row blocks if it is large."""
        y = onto or block.rec.temp(x.shape, name="mlp")
        for start, stop in block.rec.row_blocks(x.shape[0], 2 * self.inner):  # gate and up are in one storage
            rows = x.rows(start, stop)
            if self.fused:
                activated = self._fused(block, rows, start)
            else:
                activated = block.gated(rows, self.stack(), start, self.gelu)
            block.project(activated, f"{self.name}.down_proj", y.rows(start, stop), start, accumulate=onto is not None)
        return y

    def _fused(self, block: Block, x: Tensor, first_row: int) -> Tensor:
        both = block.project(x, f"{self.name}.gate_up_proj", first_row=first_row)
        parts = block.rec.temps(*[(x.shape[0], self.inner)] * 2, name="gate and up")
        split_columns(block.rec, both, parts)
        return (geglu if self.gelu else swiglu)(block.rec, *parts)
