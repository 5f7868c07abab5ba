"""What a layer's block is recorded with: its tensors, the batch, adapters and, in generation, its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.cache import LayerCache
from wgpu_lora.models.inputs import StepInputs
from wgpu_lora.ops.linear import Linear, LoraSlots, linear
from wgpu_lora.ops.norm import rmsnorm
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import Weight

Adapters = Mapping[str, LoraSlots]  # by module: 'model.layers.0.self_attn.q_proj'


@dataclass(frozen=True)
class Layer:
    """A layer's frozen matrices by module ('self_attn.q_proj'), its vectors by parameter ('input_layernorm.weight')."""

    path: str  # 'model.layers.0'
    linears: dict[str, Linear[Weight]]
    vectors: dict[str, Tensor]


@dataclass(frozen=True)
class Block:
    """One layer of one recording. Rows are those of the batch; `cache` is None where nothing is kept between tokens."""

    rec: Recorder
    layer: Layer
    inputs: StepInputs
    adapters: Adapters
    cache: LayerCache | None

    def project(
        self, x: Tensor, module: str, into: Tensor | None = None, first_row: int | None = None, accumulate: bool = False
    ) -> Tensor:
        """A linear layer with its adapters: x [T, in] -> [T, out], in `into` if given, or added to it.

        first_row: the batch's row that is row 0 of x, where x is a block of rows.
        """
        lora = self.adapters.get(f"{self.layer.path}.{module}")
        if lora and first_row is not None:
            lora = lora.block(first_row, first_row + x.shape[0])
        return linear(self.rec, x, self.layer.linears[module], lora, into, accumulate)

    def norm(self, x: Tensor, module: str, eps: float) -> Tensor:
        """RMSNorm over the last dimension by the weight of this module ('input_layernorm')."""
        return rmsnorm(self.rec, x, self.layer.vectors[f"{module}.weight"], eps)
