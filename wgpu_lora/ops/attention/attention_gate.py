"""Gates of attention: a projection has a query and a gate for each head, and the head's output is multiplied by
sigmoid(gate)."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, In, InOut, Out, kernel, linear_grid
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.elementwise import put_columns, take_columns
from wgpu_lora.ops.recorder import Recorder

PER_VALUE: dict[str, Any] = {"grid": lambda c: linear_grid(c.size)}


@kernel("gate_forward.wgsl", lib=("linear", "logistic"), **PER_VALUE)
def gate_forward(x: In, gates: In, y: Out, *, size: U32, dim: U32) -> Any:
    """y[t, h] = x[t, h] sigmoid(gates[t, h, 1])."""
    return x.reshape(-1, dim) / (1 + np.exp(-gates.reshape(-1, 2, dim)[:, 1]))


@kernel("gate_backward.wgsl", lib=("linear", "logistic"), **PER_VALUE)
def gate_backward(x: In, gates: In, dy: In, dx: Out, dgates: InOut, *, size: U32, dim: U32) -> Any:
    """dx = dy sigmoid(gate), and dgates, of the second part of each head, = dy x sigmoid'(gate)."""
    s = 1 / (1 + np.exp(-gates.reshape(-1, 2, dim)[:, 1]))
    dy, dgates = dy.reshape(-1, dim), dgates.copy()
    dgates.reshape(-1, 2, dim)[:, 1] = dy * x.reshape(-1, dim) * s * (1 - s)
    return dy * s, dgates


def query_part(rec: Recorder, projected: Tensor, heads: int) -> Tensor:
    """The queries [T, heads, dim] of a projection [T, heads * 2 * dim]; then `gated` must be recorded on it, too."""
    rows, dim = projected.shape[0], projected.shape[1] // (2 * heads)
    y = rec.temp((rows, heads, dim), name="q")
    shape: dict[str, Any] = {"rows": rows * heads, "cols": 2 * dim, "width": dim, "first": 0}
    rec.dispatch(take_columns, projected, y, **shape)

    def backward() -> None:  # after that of `gated`, which has begun the gradient
        rec.dispatch(put_columns, rec.gradient(y), rec.gradient(projected), **shape)

    rec.node(backward, inputs=[projected], outputs=[y])
    return y


def gated(rec: Recorder, x: Tensor, projected: Tensor) -> Tensor:
    """x [T, heads, dim] times the sigmoid of the projection's gates; [T, heads * dim]."""
    y = rec.temp((x.shape[0], x.shape[1] * x.shape[2]), name="gated")
    shape: dict[str, Any] = {"size": x.size, "dim": x.shape[2]}

    def record(y: Tensor) -> None:
        rec.dispatch(gate_forward, x, projected, y, **shape)

    record(y)
    rec.cheap(y, record)

    def backward() -> None:
        targets = [rec.gradient_target(part) for part in (x, projected)]
        assert not any(accumulate for _, accumulate in targets), "x or its gates have other uses"
        (dx, _), (dgates, _) = targets
        rec.dispatch(gate_backward, x, projected, rec.gradient(y), dx, dgates, **shape)

    rec.node(backward, inputs=[x, projected], outputs=[y])
    return y
