"""Matrices whose own constants are trained, and their gradients, by way of the gradient of a block of W's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from wgpu_lora.gpu.kernel import U32, Fixed, In, Out, kernel, linear_grid
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.linear import FrozenMatrix
from wgpu_lora.ops.matmul import lora_tn
from wgpu_lora.ops.recorder import Recorder

GRADIENT_BYTES = 16 << 20  # of the gradient by W that is kept at a time
COLUMNS = 64  # blocks of dW^T are multiples of this
F16_MAX = 65504.0


@kernel("snap_f16.wgsl", grid=lambda c: linear_grid(c.size), lib=("linear", "half"))
def snap_f16(x: In, enabled: Fixed, y: Out, *, size: U32) -> Any:
    """y = x rounded to f16 if enabled[0] is 1, else x. Its gradient is taken to be 1 (Bengio et al. 2013)."""
    if not enabled[0]:
        return x
    return x.astype(np.float32).clip(-F16_MAX, F16_MAX).astype(np.float16).astype(np.float64)


class TrainableMatrix(FrozenMatrix, Protocol):
    """A matrix made of codes, which are frozen, and of constants, which are trained."""

    def reduce_dw(self, rec: Recorder, dw: Tensor, first: int, grads: Mapping[str, Tensor]) -> None:
        """Adds to the gradients of the constants, by name.

        dw: f32 [in, columns], the gradient by the rows [first, first + columns) of W, transposed.
        """


@dataclass(frozen=True)
class TrainedMatrix:
    """A trainable matrix in a batch.

    grads: of its constants, by name. ranges: u32 [1, 2], the rows of the batch that are trained.
    first_row: index in the batch of row 0 of x.
    """

    weight: TrainableMatrix
    grads: Mapping[str, Tensor]
    ranges: Tensor
    first_row: int = 0

    @property
    def out_features(self) -> int:
        return self.weight.out_features

    @property
    def in_features(self) -> int:
        return self.weight.in_features

    def block(self, start: int) -> TrainedMatrix:
        """The same matrix for a block of rows of x that begins at `start`."""
        return replace(self, first_row=start)

    def forward(self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        self.weight.forward(rec, x, y, bias, accumulate)

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool) -> None:
        self.weight.backward(rec, dy, dx, accumulate)

    def record_gradients(self, rec: Recorder, x: Tensor, dy: Tensor) -> None:
        """Adds to the gradients of the constants; dW is never whole in memory."""
        out, size_in = self.out_features, self.in_features
        limit = min(GRADIENT_BYTES, rec.program.device.max_binding) // (4 * size_in)
        step = max(COLUMNS, limit // COLUMNS * COLUMNS)
        for first in range(0, out, step):
            columns = min(step, out - first)
            dw = rec.temp((size_in, columns), name="dW")
            shape = {"m": size_in, "n": columns, "k": x.size // size_in, "slots": 1, "stride": size_in * columns}
            part = {"b_skip": out - columns, "b_first": first, "first_row": self.first_row}
            rec.dispatch(lora_tn, x, dy, dw, self.ranges, accumulate=False, **shape, **part)
            self.weight.reduce_dw(rec, dw, first, self.grads)
