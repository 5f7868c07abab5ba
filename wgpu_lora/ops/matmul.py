"""Kernels of every matrix product: dense and NF4, forward and input gradient, and the thin products of LoRA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Dim, Fixed, Flag, Grid, In, InOut, Tiles, Word, cdiv, kernel
from wgpu_lora.quant.nf4 import NF4_CODE

FILE = "matmul.wgsl.j2"


def tile_grid(c: Any) -> Grid:
    return (cdiv(c.m, c.rows), cdiv(c.n, c.lanes * c.cols), c.slots if c.form == "tn" else 1)


def divisibility(c: Any) -> dict[str, bool]:
    """What the template must know of a shape: which operands are whole vec4s, pairs or words. The rest is uniform."""
    rows_of_a = c.m if c.form == "tn" else c.k
    offsets = [getattr(c, name, 0) for name in ("stride", "a_skip", "a_first")]
    quads = rows_of_a % 4 == 0 and all(offset % 4 == 0 for offset in offsets)
    words = c.k if c.form == "nt" else c.n
    return {
        "quads": quads,
        "even": c.form == "nn" and c.b_type in ("bf16", "f16") and c.n % 2 == 0,
        "octets": c.b_type == "nf4" and words % 8 == 0,
    }


def tiles(*shapes: tuple[int, int]) -> Callable[[int], list[Tiles]]:
    """Tilings (rows, columns a lane), the default first; without subgroups a workgroup has 32 independent lanes."""

    plain: Tiles = {"rows": 8, "cols": 4, "sg": 0, "lanes": 32}

    def variants(subgroup_size: int) -> list[Tiles]:
        if subgroup_size not in (4, 8, 16, 32, 64):
            return [plain, {**plain, "rows": 4, "cols": 2}]
        return [*({"rows": r, "cols": c, "sg": subgroup_size, "lanes": subgroup_size} for r, c in shapes), plain]

    return variants


WIDE = tiles((16, 2), (8, 4), (8, 2), (16, 1))
THIN = tiles((8, 2), (16, 1), (4, 2))


def _nf4_weight(codes: np.ndarray, scales: np.ndarray, out: int, size_in: int) -> np.ndarray:
    """W[out, in] in float64 from device words [ceil(in / 8), out] and one scale for each 64 flattened values."""
    nibbles = (codes.reshape(-1, out).astype(np.uint64)[:, :, None] >> (4 * np.arange(8, dtype=np.uint64))) & 15
    values = NF4_CODE.astype(np.float64)[nibbles].transpose(1, 0, 2).reshape(out, -1)[:, :size_in]
    block = np.arange(out * size_in).reshape(out, size_in) // 64
    return values * scales.astype(np.float64).reshape(-1)[block]


def _finish(
    y: np.ndarray, product: np.ndarray, accumulate: bool, bias: Any = None, row_scale: Any = None
) -> np.ndarray:
    product = product + (0 if bias is None else bias)
    if row_scale is not None:
        return y * row_scale.reshape(-1, 1) + product
    return y + product if accumulate else product


def _range(x: np.ndarray, rows: int, first: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(x by rows, its columns [first, first + width)), both views."""
    whole = x.reshape(rows, -1)
    return whole, whole[:, first : first + width]


@kernel(FILE, grid=tile_grid, variants=WIDE, specialise=divisibility)
def matmul_nt(
    a: In,
    b: Fixed,
    y: InOut,
    bias: Fixed = None,
    count: Fixed = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    a_skip: Dim = 0,
    a_first: Dim = 0,
    y_skip: Dim = 0,
    y_first: Dim = 0,
    accumulate: Flag = False,
    b_type: Word = "f32",
    form: Word = "nt",
) -> Any:
    """y[m, n] (+)= sum_k a[m, k] b[n, k] (+ bias[n]); tiles wholly past row count[0] are left alone."""
    left, (result, part) = _range(a, m, a_first, k)[1], _range(y.copy(), m, y_first, n)
    part[:] = _finish(part, left @ b.reshape(n, k).T, accumulate, None if bias is None else bias[y_first : y_first + n])
    return result


@kernel(FILE, grid=tile_grid, variants=WIDE, specialise=divisibility)
def matmul_nn(
    a: In,
    b: Fixed,
    y: InOut,
    row_scale: In = None,
    count: Fixed = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    a_skip: Dim = 0,
    a_first: Dim = 0,
    y_skip: Dim = 0,
    y_first: Dim = 0,
    accumulate: Flag = False,
    b_type: Word = "f32",
    form: Word = "nn",
) -> Any:
    """y[m, n] (+)= sum_k a[m, k] b[k, n]; with row_scale, y[m] is scaled by row_scale[m] first."""
    left, (result, part) = _range(a, m, a_first, k)[1], _range(y.copy(), m, y_first, n)
    part[:] = _finish(part, left @ b.reshape(k, n), accumulate, None, row_scale)
    return result


@kernel(FILE, grid=tile_grid, variants=WIDE, specialise=divisibility, lib=("nf4",))
def nf4_matmul(
    a: In,
    codes: Fixed,
    scales: In,
    y: InOut,
    bias: Fixed = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    accumulate: Flag = False,
    b_type: Word = "nf4",
    form: Word = "nt",
) -> Any:
    """y[m, n] (+)= sum_k a[m, k] W[n, k] (+ bias[n]) for an NF4 W[n, k]."""
    weight = _nf4_weight(codes, scales, n, k)
    return _finish(y.reshape(m, n), a.reshape(m, k) @ weight.T, accumulate, bias)


@kernel(FILE, grid=tile_grid, variants=WIDE, specialise=divisibility, lib=("nf4",))
def nf4_matmul_backward(
    a: In,
    codes: Fixed,
    scales: In,
    y: InOut,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    accumulate: Flag = False,
    b_type: Word = "nf4",
    form: Word = "nn",
) -> Any:
    """dx[m, n] (+)= sum_k dy[m, k] W[k, n] for an NF4 W[k, n]: the same codes that the forward pass reads."""
    weight = _nf4_weight(codes, scales, k, n)
    return _finish(y.reshape(m, n), a.reshape(m, k) @ weight, accumulate)


def _slot_rows(ranges: np.ndarray, first_row: int, count: int) -> np.ndarray:
    """Each slot's rows [start, stop) among the `count` rows of the batch from first_row on."""
    return np.clip(ranges.reshape(-1, 2).astype(int) - first_row, 0, count)


def _by_slot(y: np.ndarray, ranges: np.ndarray, first_row: int, product: Any, accumulate: bool) -> np.ndarray:
    """Rows of no slot keep what they had."""
    result = y.copy()
    for slot, (start, stop) in enumerate(_slot_rows(ranges, first_row, len(y))):
        rows = slice(start, stop)
        result[rows] = (result[rows] if accumulate else 0) + product(slot, rows)
    return result


@kernel(FILE, grid=tile_grid, variants=THIN, specialise=divisibility)
def lora_nt(
    a: In,
    b: Fixed,
    y: InOut,
    ranges: Fixed,
    scale: Fixed = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    slots: U32,
    stride: Dim,
    first_row: Dim = 0,
    accumulate: Flag = False,
    b_type: Word = "f32",
    form: Word = "nt",
) -> Any:
    """y[t] (+)= scale[s] b[s] a[t], s the slot of row t, b[s] [n, k] at s * stride; other rows are left alone.

    ranges counts rows of the whole batch, of which a and y hold those from first_row on.
    """
    weights = b.reshape(slots, stride)[:, : n * k].reshape(slots, n, k)
    factor = np.ones(slots) if scale is None else scale.reshape(-1)
    left = a.reshape(m, k)
    return _by_slot(
        y.reshape(m, n), ranges, first_row, lambda s, rows: factor[s] * (left[rows] @ weights[s].T), accumulate
    )


@kernel(FILE, grid=tile_grid, variants=THIN, specialise=divisibility)
def lora_nn(
    a: In,
    b: Fixed,
    y: InOut,
    ranges: Fixed,
    scale: Fixed = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    slots: U32,
    stride: Dim,
    first_row: Dim = 0,
    accumulate: Flag = False,
    b_type: Word = "f32",
    form: Word = "nn",
) -> Any:
    """y[t] (+)= scale[s] b[s]^T a[t], s the slot of row t, b[s] [k, n] at s * stride; other rows are left alone."""
    weights = b.reshape(slots, stride)[:, : n * k].reshape(slots, k, n)
    factor = np.ones(slots) if scale is None else scale.reshape(-1)
    left = a.reshape(m, k)
    return _by_slot(
        y.reshape(m, n), ranges, first_row, lambda s, rows: factor[s] * (left[rows] @ weights[s]), accumulate
    )


@kernel(FILE, grid=tile_grid, variants=tiles((8, 2), (16, 1), (16, 2)), specialise=divisibility)
def lora_tn(
    a: In,
    b: In,
    y: InOut,
    ranges: Fixed,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    slots: U32,
    stride: Dim,
    first_row: Dim = 0,
    accumulate: Flag = True,
    b_type: Word = "f32",
    form: Word = "tn",
) -> Any:
    """y[s] [m, n] at s * stride (+)= sum over slot s's rows t of a[t, m] b[t, n]: a factor's gradient, no atomics."""
    result = y.reshape(slots, stride).copy()
    left, right = a.reshape(-1, m), b.reshape(-1, n)
    for slot, (start, stop) in enumerate(_slot_rows(ranges, first_row, k)):
        product = (left[start:stop].T @ right[start:stop]).reshape(-1)
        result[slot, : m * n] = product + (result[slot, : m * n] if accumulate else 0)
    return result
