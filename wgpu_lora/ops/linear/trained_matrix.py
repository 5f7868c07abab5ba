"""Matrices whose own constants are trained, and their gradients, by way of the gradient of a block of W's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.gpu.kernel import U32, In, Out, ReadOnly, kernel, linear_grid
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.linear.frozen_product import FrozenMatrix
from wgpu_lora.ops.matmul.matmul import lora_tn
from wgpu_lora.ops.recorder import Recorder

GRADIENT_BYTES = 16 << 20  # of the gradient by W that is kept at a time
COLUMNS = 64  # blocks of dW^T are multiples of this
F16_MAX = 65504.0


@kernel("snap_f16.wgsl", grid=lambda c: linear_grid(c.size), lib=("linear", "half"))
def snap_f16(x: In, enabled: ReadOnly, y: Out, *, size: U32) -> Any:
    """y = x rounded to f16 if enabled[0] is 1, else x. Its gradient is taken to be 1 (Bengio et al. 2013)."""
    if not enabled[0]:
        return x
    return x.astype(np.float32).clip(-F16_MAX, F16_MAX).astype(np.float16).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class TrainedMatrix(FrozenMatrix):
    """A matrix in a batch, made of codes, which are frozen, and of constants, which are trained.

    grads: of its constants, by name. ranges: u32 [1, 2], the rows of the batch that are trained.
    first_row: index in the batch of row 0 of x.
    """

    grads: Mapping[str, Tensor]
    ranges: Tensor
    first_row: int = 0
    trains: ClassVar[bool] = True

    def block(self, start: int) -> TrainedMatrix:
        return replace(self, first_row=start)

    def reduce_dw(self, rec: Recorder, dw: Tensor, first: int) -> None:
        """Adds to the gradients of the constants.

        dw: f32 [in, columns], the gradient by the rows [first, first + columns) of W, transposed.
        """
        raise NotImplementedError

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
            self.reduce_dw(rec, dw, first)
