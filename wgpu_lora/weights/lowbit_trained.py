"""A low-bit matrix whose constants are trained, f32, while its codes are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.lowbit_codes import entries, groups
from wgpu_lora.weights.lowbit_gradients import record_codes_gradient
from wgpu_lora.weights.lowbit_products import CodesProduct

CONSTANTS = "constants"


@dataclass(frozen=True)
class TrainedCodes:
    """A `TrainableMatrix` (ops.trained). constants: f32 [entries + groups, out], all tables and then all scales, as the
    products read them; only their order matters."""

    out_features: int
    in_features: int
    bits: int
    group: int
    codes: Tensor
    constants: Tensor

    @property
    def _product(self) -> CodesProduct:
        shape = (self.out_features,), self.in_features
        return CodesProduct(*shape, self.bits, self.group, self.codes, self.constants)

    def forward(self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        self._product.forward(rec, x, y, bias, accumulate, None)

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool) -> None:
        self._product.backward(rec, dy, dx, accumulate, None)

    def reduce_dw(self, rec: Recorder, dw: Tensor, first: int, grads: Mapping[str, Tensor]) -> None:
        shape = self.out_features, self.in_features
        tensors = self.codes, self.constants, grads[CONSTANTS]
        record_codes_gradient(rec, dw, *tensors, shape, first, self.bits, self.group)


def constants_shape(shape: tuple[int, int], bits: int, group: int) -> tuple[int, int]:
    """The shape of all constants of a matrix [out, in] as one array."""
    out, size_in = shape
    return entries(bits) + groups(size_in, bits, group), out
