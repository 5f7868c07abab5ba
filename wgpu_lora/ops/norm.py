"""RMSNorm with a frozen weight (Zhang and Sennrich 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Fixed, Flag, In, InOut, Out, kernel
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.ops.rows import by_subgroup, row_grid


@kernel("rmsnorm_forward.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def rmsnorm_forward(x: In, weight: Fixed, y: Out, rstd: Out, *, rows: U32, cols: U32, eps: F32) -> Any:
    """y[r] = x[r] * rstd[r] * weight, with rstd[r] = 1 / sqrt(mean(x[r]^2) + eps)."""
    x = x.reshape(rows, cols)
    rstd = 1 / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)
    return x * rstd * weight, rstd.reshape(-1)


@kernel("rmsnorm_backward.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def rmsnorm_backward(
    x: In, weight: Fixed, rstd: In, dy: In, dx: InOut, *, rows: U32, cols: U32, accumulate: Flag = False
) -> Any:
    """dx (+)= rstd * (g - x rstd^2 mean(g x)), with g = dy * weight."""
    x, dy = x.reshape(rows, cols), dy.reshape(rows, cols)
    g, r = dy * weight, rstd.reshape(-1, 1)
    gradient = r * (g - x * r**2 * (g * x).mean(axis=1, keepdims=True))
    return dx.reshape(rows, cols) + gradient if accumulate else gradient


def rmsnorm(rec: Recorder, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divides x [..., cols] by the root mean square of its last dimension and multiplies it by weight [cols]."""
    cols = weight.size
    rows = x.size // cols
    y, rstd = rec.temp(x.shape, name="normed"), rec.temp((rows,), name="rstd")
    rec.dispatch(rmsnorm_forward, x, weight, y, rstd, rows=rows, cols=cols, eps=eps)

    def backward() -> None:
        dx, accumulate = rec.gradient_target(x)
        rec.dispatch(
            rmsnorm_backward, x, weight, rstd, rec.gradient(y), dx, rows=rows, cols=cols, accumulate=accumulate
        )

    rec.node(backward, inputs=[x], outputs=[y])
    return y
