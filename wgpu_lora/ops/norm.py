"""RMSNorm with a frozen weight (Zhang and Sennrich 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Fixed, Flag, In, InOut, Out, kernel
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.ops.rows import by_subgroup, row_grid


@kernel("rmsnorm_forward.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def rmsnorm_forward(
    x: In, weight: Fixed, y: Out, rstd: Out, branch: In = None, total: Out = None, *, rows: U32, cols: U32, eps: F32
) -> Any:
    """y[r] = x[r] * rstd[r] * weight, with rstd[r] = 1 / sqrt(mean(x[r]^2) + eps); of total = x + branch, if given."""
    x = x.reshape(rows, cols) + (0 if branch is None else branch.reshape(rows, cols))
    rstd = 1 / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)
    return (x * rstd * weight, rstd.reshape(-1), *([] if branch is None else [x]))


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
    return _rmsnorm(rec, x, None, weight, eps)[1]


def residual_rmsnorm(rec: Recorder, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + branch, and its `rmsnorm`. `branch` must have no other use, as in `residual`."""
    return _rmsnorm(rec, x, branch, weight, eps)


def _rmsnorm(rec: Recorder, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    shape: dict[str, Any] = {"rows": x.size // weight.size, "cols": weight.size}
    y, rstd = rec.temp(x.shape, name="normed"), rec.temp((shape["rows"],), name="rstd")
    total = rec.temp(x.shape, name="residual") if branch else x
    rec.dispatch(rmsnorm_forward, x, weight, y, rstd, branch, total if branch else None, eps=eps, **shape)
    rec.save_for_backward(total)
    rec.cheap(y, lambda y: rec.dispatch(rmsnorm_forward, total, weight, y, rec.temp(rstd.shape), eps=eps, **shape))

    def backward() -> None:
        dtotal, accumulate = rec.gradient_target(total)
        rec.dispatch(rmsnorm_backward, total, weight, rstd, rec.gradient(y), dtotal, accumulate=accumulate, **shape)
        if branch:
            rec.share_gradient(total, [x, branch])

    rec.node(backward, inputs=[x, *([branch] if branch else [])], outputs=[y, *([total] if branch else [])])
    return total, y
