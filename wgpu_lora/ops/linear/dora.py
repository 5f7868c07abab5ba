"""DoRA: linear layers whose weight's rows have a trained magnitude (Liu et al. 2024).

    y = g x (W + s B A)^T + bias, with g = m / ||W + s B A|| by row of the weight

As in PEFT, the norm is a constant of the step, without a gradient. It takes one product of the frozen matrix with A's
rows, whatever the base format: ||W_o + s B_o A||^2 = ||W_o||^2 + 2 s B_o (A W^T)_o + s^2 B_o A A^T B_o^T.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import (
    U32,
    Dim,
    Flag,
    In,
    InOut,
    Offset,
    Out,
    ReadOnly,
    by_subgroup,
    cdiv,
    kernel,
    linear_grid,
    row_grid,
)
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.linear.lora import LoraSlots
from wgpu_lora.ops.recorder import Recorder

CHUNK = 64  # rows that one invocation sums


def slots_of(ranges: Any, first_row: int, rows: int) -> list[slice]:
    """Each slot's rows among the batch's rows [first_row, first_row + rows)."""
    return [slice(a, b) for a, b in (ranges.reshape(-1, 2).astype(int) - first_row).clip(0, rows)]


@kernel("magnitude_scale.wgsl.j2", grid=lambda c: linear_grid(c.rows * c.cols), lib=("linear",))
def magnitude_scale(
    u: In,
    gain: ReadOnly,
    ranges: ReadOnly,
    y: InOut,
    bias: ReadOnly = None,
    *,
    rows: U32,
    cols: U32,
    slots: U32,
    stride: U32,
    first_row: Offset[Dim] = 0,
    accumulate: Flag = False,
) -> Any:
    """y[t] (+)= gain[s] u[t] (+ bias), s the slot of row t, gain[s] at s * stride; the gain of other rows is 1."""
    result = u.reshape(rows, cols).copy()
    for s, own in enumerate(slots_of(ranges, first_row, rows)):
        result[own] *= gain.reshape(slots, stride)[s, :cols]
    result = result + (0 if bias is None else bias)
    return y.reshape(rows, cols) + result if accumulate else result


@kernel("magnitude_partial.wgsl.j2", grid=lambda c: linear_grid(c.slots * c.chunks * c.cols), lib=("linear",))
def magnitude_partial(
    dy: In,
    u: In,
    ranges: ReadOnly,
    partial: Out,
    *,
    rows: U32,
    cols: U32,
    slots: U32,
    chunk: U32,
    chunks: U32,
    first_row: Offset[Dim] = 0,
) -> Any:
    """partial[s, i] = the sum of dy[t] u[t] over rows [i * chunk, (i + 1) * chunk) of slot s."""
    products, result = dy.reshape(rows, cols) * u.reshape(rows, cols), np.zeros((slots, chunks, cols))
    for s, own in enumerate(slots_of(ranges, first_row, rows)):
        for i in range(chunks):
            result[s, i] = products[own][i * chunk : (i + 1) * chunk].sum(axis=0)
    return result


@kernel("magnitude_gradient.wgsl", grid=lambda c: linear_grid(c.slots * c.cols), lib=("linear",))
def magnitude_gradient(
    partial: In, norm: ReadOnly, gradient: InOut, *, cols: U32, slots: U32, chunks: U32, stride: U32, slot_stride: U32
) -> Any:
    """gradient[s] at s * slot_stride += sum over chunks of partial[s] / norm[s], norm[s] at s * stride; not where the
    norm is 0."""
    result, norms = gradient.reshape(-1).copy(), norm.reshape(slots, stride)[:, :cols]
    for s, sums in enumerate(partial.reshape(slots, chunks, cols).sum(axis=1)):
        own = result[s * slot_stride :][:cols]
        own += np.divide(sums, norms[s], out=np.zeros(cols), where=norms[s] != 0)
    return result


@kernel("gram.wgsl.j2", grid=row_grid(lambda c: c.rows * c.rows), variants=by_subgroup)
def gram(a: ReadOnly, y: Out, *, rows: U32, cols: U32) -> Any:
    """y = a a^T."""
    matrix = a.reshape(-1)[: rows * cols].reshape(rows, cols)
    return matrix @ matrix.T


@kernel("adapted_norm.wgsl.j2", grid=lambda c: linear_grid(c.rows), lib=("linear",))
def adapted_norm(
    p: In,
    gram: In,
    b: ReadOnly,
    m: ReadOnly,
    squares: ReadOnly,
    scale: ReadOnly,
    norm: Out,
    gain: Out,
    *,
    rows: U32,
    rank: U32,
    scale_at: Offset[Dim] = 0,
) -> Any:
    """norm[o] = sqrt(squares[o] + 2 s b[o] p[:, o] + s^2 b[o] gram b[o]^T), s = scale[scale_at]; gain = m / norm, 1
    where the norm is 0."""
    s, factor = scale.reshape(-1)[int(scale_at)], b.reshape(-1)[: rows * rank].reshape(rows, rank)
    cross = (factor * p.reshape(rank, rows).T).sum(axis=1)
    square = ((factor @ gram.reshape(rank, rank)) * factor).sum(axis=1)
    result = np.sqrt(np.maximum(squares.reshape(-1)[:rows] + s * (2 * cross + s * square), 0))
    return result, np.divide(m.reshape(-1)[:rows], result, out=np.ones(rows), where=result != 0)


def magnified(rec: Recorder, u: Tensor, lora: LoraSlots, bias: Tensor | None, y: Tensor, accumulate: bool) -> Tensor:
    """y (+)= g u (+ bias), for u [T, out] = x (W + s B A)^T. The backward pass accumulates the gradient of m."""
    magnitudes = lora.magnitudes
    assert magnitudes is not None
    rows, cols = u.shape
    ranges, gain, norm = lora.ranges, magnitudes.gain, magnitudes.norm
    shape: dict[str, Any] = {"cols": cols, "slots": lora.slots}
    whole = {**shape, "rows": rows, "first_row": lora.first_row}
    rec.dispatch(magnitude_scale, u, gain, ranges, y, bias, **whole, stride=gain.shape[1], accumulate=accumulate)

    def backward() -> None:
        dy, chunks = rec.gradient(y), cdiv(rows, CHUNK)
        partial = rec.temp((lora.slots, chunks, cols), name="partial dm")
        rec.dispatch(magnitude_partial, dy, u, ranges, partial, **whole, chunk=CHUNK, chunks=chunks)
        strides = {"stride": norm.shape[1], "slot_stride": magnitudes.m.stride}
        rec.dispatch(magnitude_gradient, partial, norm, magnitudes.m.grads, **shape, chunks=chunks, **strides)
        if rec.tracks(u):
            du, adds = rec.gradient_target(u)
            rec.dispatch(magnitude_scale, dy, gain, ranges, du, **whole, stride=gain.shape[1], accumulate=adds)

    rec.node(backward, inputs=[u], outputs=[y], trains=True)
    return y
