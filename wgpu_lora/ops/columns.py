"""Splitting the output of a fused matrix, such as q, k and v in one, into tensors of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Dim, In, InOut, Out, kernel, one_per
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.recorder import Recorder


@kernel("take_columns.wgsl", grid=lambda c: one_per(c.rows * c.width), lib=("linear",))
def take_columns(x: In, y: Out, *, rows: Dim, cols: U32, width: U32, first: U32) -> Any:
    """y[r] = x[r, first : first + width]."""
    return x.reshape(rows, cols)[:, first : first + width]


@kernel("put_columns.wgsl", grid=lambda c: one_per(c.rows * c.width), lib=("linear",))
def put_columns(x: In, y: InOut, *, rows: Dim, cols: U32, width: U32, first: U32) -> Any:
    """y[r, first : first + width] = x[r]."""
    result: np.ndarray = y.reshape(rows, cols).copy()
    result[:, first : first + width] = x.reshape(rows, width)
    return result


def split_columns(rec: Recorder, x: Tensor, parts: Sequence[Tensor]) -> None:
    """Copies the columns of x [T, sum of widths] to `parts`, [T, width] each, in order. x must have no other use."""
    places = list(_places(x, parts))
    for part, shape in places:
        rec.dispatch(take_columns, x, part, **shape)
    rec.save_for_backward(*parts)

    def backward() -> None:
        dx = rec.new_gradient(x)
        for part, shape in places:
            rec.dispatch(put_columns, rec.gradient(part), dx, **shape)

    rec.node(backward, inputs=[x], outputs=list(parts))


def _places(x: Tensor, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, dict[str, int]]]:
    rows, first = x.shape[0], 0
    for part in parts:
        width = part.size // rows
        yield part, {"rows": rows, "cols": x.size // rows, "width": width, "first": first}
        first += width
    assert first * rows == x.size, f"{first} columns of {x.size // rows}"
