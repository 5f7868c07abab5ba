"""RMSNorm with a frozen weight (Zhang and Sennrich 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Flag, In, InOut, Out, ReadOnly, by_subgroup, kernel, row_grid
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.recorder import Recorder


@kernel("rmsnorm_forward.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def rmsnorm_forward(
    x: In, weight: ReadOnly, y: Out, rstd: Out, branch: In = None, total: Out = None, *, rows: U32, cols: U32, eps: F32
) -> Any:
    """y[r] = x[r] * rstd[r] * weight, with rstd[r] = 1 / sqrt(mean(x[r]^2) + eps); of total = x + branch, if given."""
    x = x.reshape(rows, cols) + (0 if branch is None else branch.reshape(rows, cols))
    rstd = 1 / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)
    return (x * rstd * weight, rstd.reshape(-1), *([] if branch is None else [x]))


@kernel("rmsnorm_backward.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def rmsnorm_backward(
    x: In, weight: ReadOnly, rstd: In, dy: In, dx: InOut, *, rows: U32, cols: U32, accumulate: Flag = False
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


PER_ROW: dict[str, Any] = {"grid": row_grid(lambda c: c.rows), "variants": by_subgroup}


@kernel("l2norm_forward.wgsl.j2", **PER_ROW)
def l2norm_forward(x: In, y: Out, *, rows: U32, cols: U32, scale: F32, eps: F32) -> Any:
    """y[r] = scale x[r] / sqrt(sum(x[r]^2) + eps)."""
    x = x.reshape(rows, cols)
    return scale * x / np.sqrt((x**2).sum(axis=1, keepdims=True) + eps)


@kernel("l2norm_backward.wgsl.j2", **PER_ROW)
def l2norm_backward(x: In, dy: In, dx: Out, *, rows: U32, cols: U32, scale: F32, eps: F32) -> Any:
    """dx[r] = scale r (dy - x r^2 sum(dy x)), with r = 1 / sqrt(sum(x^2) + eps)."""
    x, dy = x.reshape(rows, cols), dy.reshape(rows, cols)
    r = 1 / np.sqrt((x**2).sum(axis=1, keepdims=True) + eps)
    return scale * r * (dy - x * r**2 * (dy * x).sum(axis=1, keepdims=True))


def _parts(x: Any, gate: Any, rows: int, cols: int, eps: float) -> Any:
    x, gate = x.reshape(rows, cols), gate.reshape(rows, cols)
    return x, gate, 1 / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps), 1 / (1 + np.exp(-gate))


@kernel("gated_norm_forward.wgsl.j2", lib=("logistic",), **PER_ROW)
def gated_norm_forward(x: In, gate: In, weight: ReadOnly, y: Out, *, rows: U32, cols: U32, eps: F32) -> Any:
    """y[r] = weight * x[r] / sqrt(mean(x[r]^2) + eps) * silu(gate[r])."""
    x, gate, rstd, s = _parts(x, gate, rows, cols, eps)
    return weight * x * rstd * gate * s


@kernel("gated_norm_backward.wgsl.j2", lib=("logistic",), **PER_ROW)
def gated_norm_backward(
    x: In, gate: In, weight: ReadOnly, dy: In, dx: Out, dgate: Out, *, rows: U32, cols: U32, eps: F32
) -> Any:
    """dgate = dy n silu'(gate) with n = weight * x rstd; dx = rstd (h - x rstd^2 mean(h x)) with h = dy silu(gate)
    weight."""
    x, gate, rstd, s = _parts(x, gate, rows, cols, eps)
    dy = dy.reshape(rows, cols)
    h = dy * gate * s * weight
    dx = rstd * (h - x * rstd**2 * (h * x).mean(axis=1, keepdims=True))
    return dx, dy * weight * x * rstd * s * (1 + gate * (1 - s))


def l2norm(rec: Recorder, q: Tensor, k: Tensor, q_scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """The heads of q and k [T, heads, dim] divided by their norms, q also multiplied by q_scale; in one storage."""
    dim = q.shape[2]
    result = rec.temps(q.shape, k.shape, name="normalised")
    shapes: list[dict[str, Any]] = [{"rows": x.size // dim, "cols": dim, "eps": eps} for x in (q, k)]
    for shape, scale in zip(shapes, (q_scale, 1.0), strict=True):
        shape["scale"] = scale

    def record(whole: Tensor) -> None:
        for x, y, shape in zip((q, k), result, shapes, strict=True):
            rec.dispatch(l2norm_forward, x, Tensor(y.shape, "f32", whole.storage, y.byte_offset), **shape)

    whole = Tensor((result[0].storage.nbytes // 4,), "f32", result[0].storage, name="normalised")
    record(whole)
    rec.cheap(whole, record)

    def backward() -> None:
        for x, y, shape in zip((q, k), result, shapes, strict=True):
            dx, accumulate = rec.gradient_target(x)
            assert not accumulate, "q and k have other uses"
            rec.dispatch(l2norm_backward, rec.rematerialize(x), rec.gradient(y), dx, **shape)

    rec.node(backward, inputs=[q, k], outputs=result[:1])
    return result[0], result[1]


def gated_norm(rec: Recorder, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) * silu(gate), of each head of x [T, heads, dim] with the gate [T, heads * dim]; [T, heads *
    dim]."""
    y = rec.temp(gate.shape, name="gated")
    shape: dict[str, Any] = {"rows": x.size // weight.size, "cols": weight.size, "eps": eps}
    rec.dispatch(gated_norm_forward, x, gate, weight, y, **shape)
    rec.save_for_backward(x)
    rec.cheap(y, lambda y: rec.dispatch(gated_norm_forward, x, gate, weight, y, **shape))

    def backward() -> None:
        targets = [rec.gradient_target(part) for part in (x, gate)]
        assert not any(accumulate for _, accumulate in targets), "x and the gate have other uses"
        (dx, _), (dgate, _) = targets
        rec.dispatch(gated_norm_backward, x, gate, weight, rec.gradient(y), dx, dgate, **shape)

    rec.node(backward, inputs=[x, gate], outputs=[y])
    return y
