"""The context in which a layer's block is recorded: its tensors, the batch, the adapters and the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.batch_inputs import StepInputs
from wgpu_lora.models.kv_cache import LayerCache
from wgpu_lora.ops.elementwise import geglu, swiglu
from wgpu_lora.ops.linear.adapted_linear import adapted_gated, adapted_linear, adapted_linears
from wgpu_lora.ops.linear.frozen_product import FrozenMatrix
from wgpu_lora.ops.linear.linear import Linear
from wgpu_lora.ops.linear.lora import LoraSlots
from wgpu_lora.ops.linear.trained_matrix import TrainedMatrix
from wgpu_lora.ops.norm import residual_rmsnorm, rmsnorm
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import Weight

Trained = LoraSlots | TrainedMatrix  # of a module: an adapter beside its matrix, or the matrix itself
Adapters = Mapping[str, Trained]  # by module: 'model.layers.0.self_attn.q_proj'


@dataclass(frozen=True)
class LayerWeights:
    """A layer's frozen matrices by module ('self_attn.q_proj') and vectors by name ('input_layernorm.weight')."""

    path: str  # 'model.layers.0'
    linears: dict[str, Linear[Weight]]
    vectors: dict[str, Tensor]


@dataclass(frozen=True)
class LayerContext:
    """A layer in a recording. `cache` is None in training and evaluation."""

    rec: Recorder
    layer: LayerWeights
    inputs: StepInputs
    adapters: Adapters
    cache: LayerCache | None

    def linear(
        self, x: Tensor, module: str, into: Tensor | None = None, first_row: int | None = None, accumulate: bool = False
    ) -> Tensor:
        """Records a linear layer with its adapters: x [T, in] -> [T, out].

        Args:
            module: path in the layer, such as 'self_attn.q_proj'.
            into: where to write the result.
            first_row: if x is a block of rows, the index of its first row in the batch.
            accumulate: add the result to `into`.
        """
        layer, lora = self._linear(module, first_row), self._lora(x, module, first_row)
        return adapted_linear(self.rec, x, layer, lora, into, accumulate)

    def linears(self, x: Tensor, modules: Sequence[str], first_row: int | None = None) -> list[Tensor]:
        """Records several linear layers of the same x, whose results are regions of one storage.

        They take one dispatch if their matrices are stored together (see `ModelConfig.stacks`). Without a cache, they
        have a storage each if one would exceed a binding.
        """
        layers = [self._linear(module, first_row) for module in modules]
        loras = [self._lora(x, module, first_row) for module in modules]
        return adapted_linears(self.rec, x, layers, loras, separate=self.cache is None)

    def gated(self, x: Tensor, modules: Sequence[str], first_row: int | None = None, gelu: bool = False) -> Tensor:
        """silu(first module) * second module, in one dispatch for few rows in generation; or with GELU."""
        layers = [self._linear(module, first_row) for module in modules]
        loras = [self._lora(x, module, first_row) for module in modules]
        if gelu:
            return geglu(self.rec, *adapted_linears(self.rec, x, layers, loras))
        result = adapted_gated(self.rec, x, layers, loras)
        return result or swiglu(self.rec, *adapted_linears(self.rec, x, layers, loras))

    def _linear(self, module: str, first_row: int | None) -> Linear[FrozenMatrix]:
        """The frozen layer, or that with the matrix that is trained."""
        layer, trained = self.layer.linears[module], self.adapters.get(f"{self.layer.path}.{module}")
        weight = trained if isinstance(trained, TrainedMatrix) else layer.weight
        return Linear(weight.block(first_row or 0), layer.bias)

    def _lora(self, x: Tensor, module: str, first_row: int | None) -> LoraSlots | None:
        lora = self.adapters.get(f"{self.layer.path}.{module}")
        if not isinstance(lora, LoraSlots):
            return None
        return lora.block(first_row, first_row + x.shape[0]) if first_row is not None else lora

    def norm(self, x: Tensor, module: str, eps: float) -> Tensor:
        """RMSNorm over the last dimension with the weight of `module`, such as 'input_layernorm'."""
        return rmsnorm(self.rec, x, self.layer.vectors[f"{module}.weight"], eps)

    def residual_norm(self, x: Tensor, branch: Tensor, module: str, eps: float) -> tuple[Tensor, Tensor]:
        """x + branch, and its `norm`, in one dispatch. `branch` must have no other use."""
        return residual_rmsnorm(self.rec, x, branch, self.layer.vectors[f"{module}.weight"], eps)
