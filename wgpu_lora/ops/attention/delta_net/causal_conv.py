"""The causal convolution along a sequence, each column by itself, and SiLU, as gated delta nets have it before
attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Dim, In, InOut, Out, ReadOnly, kernel, linear_grid
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.recorder import Recorder

NOWHERE = 0xFFFFFFFF
Shape = dict[str, Any]
PER_VALUE: Shape = {"grid": lambda c: linear_grid(c.rows * c.cols), "lib": ("linear", "logistic")}


def _before(x: np.ndarray, runs: np.ndarray, back: int, state: np.ndarray | None) -> np.ndarray:
    """x `back` rows earlier in the same sequence [rows, cols], from the state before the batch if there is one, or
    0."""
    before, _, sequence, goes_on = runs.reshape(-1, 4).astype(np.int64).T
    result = np.zeros_like(x)
    index = np.flatnonzero(before >= back)
    result[index] = x[index - back]
    if state is not None:
        rows = np.flatnonzero((before < back) & (goes_on != 0))
        result[rows] = state[sequence[rows], state.shape[1] + before[rows] - back]
    return result


def _sum(
    x: np.ndarray,
    weight: np.ndarray,
    runs: np.ndarray,
    rows: int,
    cols: int,
    taps: int,
    state: np.ndarray | None = None,
) -> np.ndarray:
    """The argument of SiLU, [rows, cols]."""
    x, weight = x.reshape(rows, cols), weight.reshape(cols, taps)
    state = None if state is None else state.reshape(-1, taps - 1, cols)
    total = np.zeros((rows, cols))
    for back in range(taps):
        total = total + weight[:, taps - 1 - back] * _before(x, runs, back, state)
    return total


def _parts(y: np.ndarray, rows: int, cols: int, key_cols: int, *firsts: int) -> list[np.ndarray]:
    """Views of the three parts of y, [rows, columns] each."""
    sizes = key_cols, key_cols, cols - 2 * key_cols
    return [y.reshape(-1)[at : at + rows * n].reshape(rows, n) for at, n in zip(firsts, sizes, strict=True)]


@kernel("causal_conv_forward.wgsl.j2", **PER_VALUE)
def causal_conv_forward(
    runs: ReadOnly,
    x: In,
    weight: ReadOnly,
    state: In = None,
    y: InOut = None,
    *,
    rows: Dim,
    q_first: Dim,
    k_first: Dim,
    v_first: Dim,
    cols: U32,
    key_cols: U32,
    taps: U32,
) -> Any:
    """y[t, c] = silu(sum_j weight[c, taps - 1 - j] x[t - j, c]) within the row's sequence, whose inputs before the
    batch, if any, are in its state [taps - 1, cols], the newest last. y is in three parts, of key_cols, key_cols and
    the other columns."""
    total, y = _sum(x, weight, runs, rows, cols, taps, state), y.copy()
    result = np.split(total / (1 + np.exp(-total)), (key_cols, 2 * key_cols), axis=1)
    for part, values in zip(_parts(y, rows, cols, key_cols, q_first, k_first, v_first), result, strict=True):
        part[:] = values
    return y


@kernel("causal_conv_slope.wgsl.j2", **PER_VALUE)
def causal_conv_slope(
    runs: ReadOnly,
    x: In,
    weight: ReadOnly,
    dy: In,
    dpre: Out,
    *,
    rows: Dim,
    q_first: Dim,
    k_first: Dim,
    v_first: Dim,
    cols: U32,
    key_cols: U32,
    taps: U32,
) -> Any:
    """dpre = dy silu'(pre), with pre the argument of silu in `causal_conv_forward`."""
    total = _sum(x, weight, runs, rows, cols, taps)
    s = 1 / (1 + np.exp(-total))
    dy = np.concatenate(_parts(dy, rows, cols, key_cols, q_first, k_first, v_first), axis=1)
    return dy * s * (1 + total * (1 - s))


@kernel("causal_conv_backward.wgsl.j2", **PER_VALUE)
def causal_conv_backward(
    runs: ReadOnly, dpre: In, weight: ReadOnly, dx: Out, *, rows: Dim, cols: U32, taps: U32
) -> Any:
    """dx[t, c] = sum_j weight[c, taps - 1 - j] dpre[t + j, c] within the row's sequence."""
    dpre, weight, after = dpre.reshape(rows, cols), weight.reshape(cols, taps), runs.reshape(-1, 4)[:, 1]
    dx = np.zeros((rows, cols))
    for ahead in range(taps):
        index = np.flatnonzero(after > ahead)
        dx[index] += weight[:, taps - 1 - ahead] * dpre[index + ahead]
    return dx


@kernel("causal_conv_state.wgsl.j2", **PER_VALUE)
def causal_conv_state(runs: ReadOnly, x: In, state: InOut, *, rows: Dim, cols: U32, taps: U32) -> Any:
    """The last taps - 1 inputs of each sequence that has rows in the batch, from those and its state before."""
    old = state.reshape(-1, taps - 1, cols)
    new, runs = old.copy(), runs.reshape(-1, 4)
    last = np.flatnonzero((runs[:, 1] == 1) & (runs[:, 2] != NOWHERE))
    for back in range(taps - 1):
        new[runs[last, 2], taps - 2 - back] = _before(x.reshape(rows, cols), runs, back, old)[last]
    return new


def causal_conv(
    rec: Recorder,
    x: Tensor,
    weight: Tensor,
    runs: Tensor,
    shapes: Sequence[tuple[int, ...]],
    state: Tensor | None = None,
) -> list[Tensor]:
    """silu(conv(x)) of x f32 [T, cols], in three parts of the given shapes in one storage; the first two are of one
    size.

    Args:
        weight: f32 [cols, 1, taps], frozen.
        runs: u32 [T, 4], see `ops.attention.delta_net.delta_chunks`.
        state: in generation, f32 [sequences, taps - 1, cols], which is read and replaced.
    """
    rows, cols = x.shape
    taps = weight.size // cols
    parts = rec.temps(*shapes, name="convolved")
    firsts = {f"{name}_first": part.byte_offset // 4 for name, part in zip("qkv", parts, strict=True)}
    shape: Shape = {"rows": rows, "cols": cols, "taps": taps}
    constants: Shape = {**shape, **firsts, "key_cols": math.prod(shapes[0][1:])}
    whole = Tensor((parts[0].storage.nbytes // 4,), "f32", parts[0].storage, name="convolved")

    def record(y: Tensor) -> None:
        rec.dispatch(causal_conv_forward, runs, x, weight, state, y, **constants)

    record(whole)
    if state is not None:
        rec.dispatch(causal_conv_state, runs, x, state, **shape)
    else:
        rec.cheap(whole, record)

    def backward() -> None:
        dpre = rec.temp(x.shape, name="dpre")
        rec.dispatch(causal_conv_slope, runs, x, weight, rec.gradient(whole), dpre, **constants)
        dx, accumulate = rec.gradient_target(x)
        assert not accumulate, "x has another use"
        rec.dispatch(causal_conv_backward, runs, dpre, weight, dx, **shape)

    rec.node(backward, inputs=[x], outputs=parts[:1])
    return parts
