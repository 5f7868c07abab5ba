"""SwiGLU, GEGLU, addition, copies, dropout and fill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import (
    F32,
    U32,
    Dim,
    Flag,
    Grid,
    In,
    InOut,
    Kernel,
    Offset,
    Out,
    ReadOnly,
    kernel,
    linear_grid,
)
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.gpu.tiling import Capabilities, Tiling
from wgpu_lora.ops.recorder import Recorder


def by_quads(c: Any) -> Grid:
    return linear_grid(c.size // 4 if c.size % 4 == 0 else c.size)


def loads(capabilities: Capabilities, c: Any) -> list[Tiling]:
    """Loads as wide as the driver wants them (see `Tiling.wide`)."""
    result = [Tiling(), Tiling(wide=True)] if capabilities.int64 else [Tiling()]
    return result[::-1] if capabilities.software else result


def quads(c: Any) -> dict[str, bool]:
    return {"quads": c.size % 4 == 0}


QUADS: dict[str, Any] = {"grid": by_quads, "lib": ("linear",), "variants": loads, "specialise": quads}


@kernel("swiglu_forward.wgsl.j2", **QUADS)
def swiglu_forward(gate: In, up: In, y: Out, *, size: U32) -> Any:
    """y = silu(gate) * up (Shazeer 2020)."""
    return gate / (1 + np.exp(-gate)) * up


@kernel("swiglu_backward.wgsl.j2", **QUADS)
def swiglu_backward(gate: In, up: In, dy: In, dgate: Out, dup: Out, *, size: U32) -> Any:
    """dgate = dy up s (1 + gate (1 - s)), dup = dy gate s, with s = sigmoid(gate)."""
    s = 1 / (1 + np.exp(-gate))
    return dy * up * s * (1 + gate * (1 - s)), dy * gate * s


@kernel("geglu_forward.wgsl.j2", **QUADS)
def geglu_forward(gate: In, up: In, y: Out, *, size: U32) -> Any:
    """y = gelu(gate) * up, with gelu(g) = g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) / 2."""
    return gate * _gelu_share(gate) * up


@kernel("geglu_backward.wgsl.j2", **QUADS)
def geglu_backward(gate: In, up: In, dy: In, dgate: Out, dup: Out, *, size: U32) -> Any:
    """dgate = dy up (s + g ds/dg), dup = dy g s, with gelu(g) = g s."""
    s = _gelu_share(gate)
    slope = s + gate * s * (1 - s) * 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * gate**2)
    return dy * up * slope, dy * gate * s


def _gelu_share(g: np.ndarray) -> np.ndarray:
    share: np.ndarray = (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) / 2
    return share


@kernel("add.wgsl", grid=lambda c: linear_grid(c.size), lib=("linear",))
def add_forward(a: In, b: In, y: Out, *, size: U32) -> Any:
    """y = a + b."""
    return a + b


@kernel("copy.wgsl.j2", **QUADS)
def copy(x: In, y: Out, *, size: U32) -> Any:
    """y = x."""
    return x


@kernel("fill.wgsl", grid=lambda c: linear_grid(c.size), lib=("linear",))
def fill(y: Out, *, size: U32, value: F32 = 0.0) -> Any:
    """y = value."""
    return np.full(size, value)


def pcg(v: np.ndarray) -> np.ndarray:
    """The PCG output permutation as a hash of uint32 (O'Neill 2014)."""
    v = v.astype(np.uint64)
    state = (v * 747796405 + 2891336453) & 0xFFFFFFFF
    word = (((state >> ((state >> 28) + 4)) ^ state) * 277803737) & 0xFFFFFFFF
    return (word >> 22) ^ word


@kernel("dropout.wgsl", grid=lambda c: linear_grid(c.rows * c.cols), lib=("linear", "dropout"))
def dropout_apply(
    x: In, draws: ReadOnly, y: InOut, *, rows: U32, cols: U32, module: Offset[U32], accumulate: Flag = False
) -> Any:
    """y (+)= x keep / (1 - p), keep hashed from dropout keys: draws[t] = (key, key, p 2^32, bits of 1 / (1 - p))."""
    draws = draws.reshape(rows, 4).astype(np.uint32)
    inner = pcg(module ^ pcg(np.arange(cols)))
    random = pcg(draws[:, :1].astype(np.uint64) ^ pcg(draws[:, 1:2].astype(np.uint64) ^ inner))
    keep = np.ascontiguousarray(draws[:, 3:4]).view(np.float32).astype(np.float64) * (random >= draws[:, 2:3])
    result = x.reshape(rows, cols) * keep
    return y.reshape(rows, cols) + result if accumulate else result


def swiglu(rec: Recorder, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, for equal shapes."""
    return _gated(rec, gate, up, swiglu_forward, swiglu_backward)


def geglu(rec: Recorder, gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, in GELU's form by tanh, for equal shapes."""
    return _gated(rec, gate, up, geglu_forward, geglu_backward)


def _gated(rec: Recorder, gate: Tensor, up: Tensor, forward: Kernel, back: Kernel) -> Tensor:
    y = rec.temp(gate.shape, name=forward.name.partition("_")[0])
    rec.dispatch(forward, gate, up, y, size=y.size)
    rec.cheap(y, lambda y: rec.dispatch(forward, gate, up, y, size=y.size))

    def backward() -> None:
        (dgate, _), (dup, _) = rec.gradient_target(gate), rec.gradient_target(up)
        rec.dispatch(back, gate, up, rec.gradient(y), dgate, dup, size=y.size)

    rec.node(backward, inputs=[gate, up], outputs=[y])
    return y


@kernel("dropout_split.wgsl", grid=lambda c: linear_grid(c.rows * c.cols), lib=("linear", "dropout"))
def dropout_split(x: In, draws: ReadOnly, dropped: Out, rest: Out, *, rows: U32, cols: U32, module: Offset[U32]) -> Any:
    """dropped = x keep / (1 - p), as in `dropout_apply`, and rest = x - dropped."""
    dropped = dropout_apply(x, draws, np.zeros((rows, cols)), rows=rows, cols=cols, module=module)
    return dropped, x.reshape(rows, cols) - dropped


@kernel("dropout_join.wgsl", grid=lambda c: linear_grid(c.rows * c.cols), lib=("linear", "dropout"))
def dropout_join(
    dropped: In,
    draws: ReadOnly,
    rest: In,
    x: InOut,
    *,
    rows: U32,
    cols: U32,
    module: Offset[U32],
    accumulate: Flag = False,
) -> Any:
    """x (+)= rest + (dropped - rest) keep / (1 - p), the gradient of `dropout_split`."""
    rest = rest.reshape(rows, cols)
    change = dropped.reshape(rows, cols) - rest
    result = rest + dropout_apply(change, draws, np.zeros((rows, cols)), rows=rows, cols=cols, module=module)
    return x.reshape(rows, cols) + result if accumulate else result


def dropout_parts(rec: Recorder, x: Tensor, draws: Tensor, module: int) -> tuple[Tensor, Tensor]:
    """dropout(x), and x without it, [T, cols] each."""
    shape = {"rows": draws.shape[0], "cols": x.size // draws.shape[0], "module": module}
    dropped, remainder = rec.temp(x.shape, name="dropped"), rec.temp(x.shape, name="not dropped")
    rec.dispatch(dropout_split, x, draws, dropped, remainder, **shape)

    def backward() -> None:
        dx, accumulate = rec.gradient_target(x)
        gradients = rec.gradient(dropped), draws, rec.gradient(remainder), dx
        rec.dispatch(dropout_join, *gradients, accumulate=accumulate, **shape)

    rec.node(backward, inputs=[x], outputs=[dropped, remainder])
    return dropped, remainder


def residual(rec: Recorder, x: Tensor, branch: Tensor) -> Tensor:
    """x + branch. `branch` must have no other use: both share y's gradient, and x's is then accumulated in place.

    This is safe because the branch's backward pass reads the shared gradient before anything is added to it.
    """
    y = rec.temp(x.shape, name="residual")
    rec.dispatch(add_forward, x, branch, y, size=y.size)

    def backward() -> None:
        rec.share_gradient(y, [x, branch])

    rec.node(backward, inputs=[x, branch], outputs=[y])
    return y


@kernel("take_columns.wgsl", grid=lambda c: linear_grid(c.rows * c.width), lib=("linear",))
def take_columns(x: In, y: Out, *, rows: Dim, cols: U32, width: U32, first: U32) -> Any:
    """y[r] = x[r, first : first + width]."""
    return x.reshape(rows, cols)[:, first : first + width]


@kernel("put_columns.wgsl", grid=lambda c: linear_grid(c.rows * c.width), lib=("linear",))
def put_columns(x: In, y: InOut, *, rows: Dim, cols: U32, width: U32, first: U32) -> Any:
    """y[r, first : first + width] = x[r]."""
    result: np.ndarray = y.reshape(rows, cols).copy()
    result[:, first : first + width] = x.reshape(rows, width)
    return result


def split_columns(rec: Recorder, x: Tensor, parts: Sequence[Tensor]) -> None:
    """Copies the columns of x [T, sum of widths] to `parts`, [T, width] each, in order. x must have no other use."""
    slices = list(_slices(x, parts))
    for part, shape in slices:
        rec.dispatch(take_columns, x, part, **shape)
    rec.save_for_backward(*parts)

    def backward() -> None:
        dx = rec.new_gradient(x)
        for part, shape in slices:
            rec.dispatch(put_columns, rec.gradient(part), dx, **shape)

    rec.node(backward, inputs=[x], outputs=list(parts))


def _slices(x: Tensor, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, dict[str, int]]]:
    rows, first = x.shape[0], 0
    for part in parts:
        width = part.size // rows
        yield part, {"rows": rows, "cols": x.size // rows, "width": width, "first": first}
        first += width
    assert first * rows == x.size, f"{first} columns of {x.size // rows}"
