"""16-bit operands (`--compute-dtype`): the inputs of frozen matmuls are rounded, and accumulated in f32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from wgpu_lora.gpu.kernel import U32, Dim, In, Out, Word, by_subgroup, kernel, linear_grid, row_grid
from wgpu_lora.gpu.tensor import ALIGNMENT, Tensor
from wgpu_lora.ops.recorder import Recorder


@kernel("to_half.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def to_half(x: In, y: Out, scale: Out = None, *, rows: U32, cols: U32, kind: Word) -> Any:
    """y = x rounded to bf16; to f16, y = x / scale[r] with scale[r] = 2^(floor(log2 max |x[r]|) - 14)."""
    x = x.reshape(rows, cols)
    if kind == "bf16":
        return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    top = np.abs(x).max(axis=1)
    power = np.floor(np.log2(np.where(top > 0, top, 2.0**-112)))
    factor = 2.0 ** (np.maximum(power, -112) - 14)
    return (x / factor[:, None]).astype(np.float16).astype(np.float64), factor


@kernel("from_half.wgsl.j2", grid=lambda c: linear_grid(c.size // 2), lib=("linear", "half"))
def from_half(x: In, y: Out, scale: In = None, *, size: Dim, cols: U32, kind: Word) -> Any:
    """y = x; from f16, y = x scale[r] for each row of `cols` values: the inverse of `to_half`. size is even."""
    return x if scale is None else (x.reshape(-1, cols) * scale.reshape(-1, 1)).reshape(-1)


def matmul_operand(rec: Recorder, x: Tensor, cols: int, *, keep: bool) -> tuple[Tensor, Tensor | None, str]:
    """Rounds x [rows, cols] to the recorder's compute dtype; returns (a, a_scale, a_type) for the matmul kernels.

    Args:
        keep: x does not change any more, so other readers may share the rounded copy.
    """
    kind = rec.compute_dtype
    if kind == "f32" or cols % 2:  # rows must be whole 32-bit words
        return x, None, "f32"
    key = (x.storage, x.byte_offset, x.size)
    if keep and key in rec.halves:
        return (*rec.halves[key], kind)
    rows = x.size // cols
    a = rec.temp((rows, cols), kind, name=f"{x.name} in {kind}")
    scale = rec.temp((rows,), name="scale") if kind == "f16" else None
    rec.dispatch(to_half, x, a, scale, rows=rows, cols=cols, kind=kind)
    if keep:
        rec.halves[key] = (a, scale)
    return a, scale, kind


def head_operand(rec: Recorder, x: Tensor, cols: int, *, keep: bool) -> tuple[Tensor, Tensor | None, str]:
    """`matmul_operand` for the LM head, whose inputs are rounded for matrix units alone."""
    units = rec.compute_dtype == "f16" and rec.program.device.capabilities.matrix
    return matmul_operand(rec, x, cols, keep=keep) if units else (x, None, "f32")


def gradient_operand(rec: Recorder, dy: Tensor, outs: Sequence[int]) -> tuple[Tensor, Tensor | None, str]:
    """`matmul_operand` of a gradient that is read once: of y with `outs` columns, or of a stack of several parts.

    The parts are rounded together, without scales, so their dtype must not be f16.
    """
    if len(outs) == 1:
        return matmul_operand(rec, dy, outs[0], keep=False)
    assert rec.compute_dtype != "f16", "the parts of a stack have scales of their own"
    return matmul_operand(rec, dy, ALIGNMENT // 4, keep=False)
