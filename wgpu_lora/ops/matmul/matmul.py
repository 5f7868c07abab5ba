"""Kernels of the dense matrix products, forward and input gradient, and of LoRA's thin products."""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Dim, Flag, Grid, In, InOut, Offset, ReadOnly, Word, cdiv, kernel
from wgpu_lora.gpu.tensor import ITEM_BYTES
from wgpu_lora.ops.matmul.matmul_layout import product_layout
from wgpu_lora.ops.matmul.matmul_tuning import (
    THIN_TILES,
    LoraTuning,
    MatmulTuning,
    block,
    dense_columns,
    dense_operand,
    product_part,
    tilings,
)
from wgpu_lora.ops.matmul.matrix_stack import ALL_PARTS, backward_reference, forward_reference, sizes

Columns = tuple[np.ndarray, np.ndarray]
FILE = "matmul/product.wgsl.j2"
DENSE = MatmulTuning(dense_operand)
DENSE_PART = product_part(dense_columns)
WIDE = tilings(4, (16, 4), (16, 2), (8, 4), owners=4)
THIN = tilings(4, (16, 2), (8, 2), (16, 1), owners=4)
EVEN = ("stride", "y_skip", "y_first", "b_skip", "b_first", "w_skip", "w_first")


def tile_grid(c: Any) -> Grid:
    rows, columns = block(c.tile)
    parts = (c.n,) if getattr(c, "gated", False) else (c.n, getattr(c, "n1", 0), getattr(c, "n2", 0))
    tiles = sum(cdiv(n, columns) for n in parts)
    slots = c.slots if c.form == "tn" else 1
    return (tiles, cdiv(c.m, rows), slots) if c.tile.family == THIN_TILES else (cdiv(c.m, rows), tiles, slots)


def divisibility(c: Any) -> dict[str, Any]:
    """The facts about a shape that are compiled in, as few as possible: each doubles the number of compute pipelines.

    octets: whether b's rows are whole groups of eight values, in a format of words (see `weights.nf4`).
    of_span: for f16, the largest power of two, up to 64, that divides the contraction.
    """
    rows_of_a, rank = [c.m] if c.form == "tn" else sizes(vars(c), "k"), getattr(c, "rank", 0)
    offsets = [getattr(c, name, 0) for name in ("stride", "a_skip", "a_first")]
    if hasattr(c, "slots"):  # `thin` tiles load b and store y four values at a time, too
        offsets += [c.n, *(getattr(c, name, 0) for name in ("b_skip", "b_first", "y_skip", "y_first"))]
    of_h = [getattr(c, name, 0) for name in ("rank", "h_skip", "h_first")]
    half = getattr(c, "a_type", "f32") == "f16"
    return {
        "quads": all(offset % 4 == 0 for offset in (*rows_of_a, *offsets)),
        "low_quads": rank > 0 and all(offset % 4 == 0 for offset in (*of_h, c.stride)),
        "even": all(n % 2 == 0 for n in sizes(vars(c), "n")) and all(getattr(c, name, 0) % 2 == 0 for name in EVEN),
        "octets": half and (c.k if c.form == "nt" else c.n) % 8 == 0,
        **({"of_span": gcd(64, *sizes(vars(c), "k"))} if half else {}),
    }


def finish(y: np.ndarray, product: np.ndarray, accumulate: bool, bias: Any = None, row_scale: Any = None) -> Any:
    product = product + (0 if bias is None else bias)
    if row_scale is not None:
        return y * row_scale.reshape(-1, 1) + product
    return y + product if accumulate else product


def operand(a: np.ndarray, m: int, k: int, a_scale: Any) -> np.ndarray:
    """a [m, k], multiplied by a_scale if its rows are stored divided by it."""
    rows = a.reshape(m, k)
    return rows if a_scale is None else rows * np.asarray(a_scale).reshape(-1, 1)


def adapted(
    h: Any,
    factor: Any,
    ranges: Any,
    m: int,
    n: int,
    rank: int,
    h_first: int,
    stride: int,
    first_row: int,
    form: str,
) -> Any:
    """LoRA's second product [m, n]: for each slot s, its rows of h[:, h_first ..+ rank] with its factor, [n, rank] (nt)
    or [rank, n] (nn) at s * stride. `ranges` as in `lora_nt`. 0 without a factor."""
    if factor is None:
        return 0
    low, result = _range(h, m, h_first, rank)[1], np.zeros((m, n))
    for slot, (start, stop) in enumerate(_slot_rows(ranges, first_row, m)):
        values = factor.reshape(-1)[slot * stride :][: n * rank]
        result[start:stop] = low[start:stop] @ (values.reshape(n, rank).T if form == "nt" else values.reshape(rank, n))
    return result


def _range(x: np.ndarray, rows: int, first: int, width: int) -> Columns:
    """Views of (x by rows, its columns [first, first + width))."""
    whole = x.reshape(rows, -1)
    return whole, whole[:, first : first + width]


@kernel(
    FILE, grid=tile_grid, variants=WIDE, specialise=divisibility, layout=product_layout, tuning=DENSE, part=DENSE_PART
)
def matmul_nt(
    a: In,
    b: ReadOnly,
    y: InOut,
    bias: ReadOnly = None,
    count: ReadOnly = None,
    a_scale: In = None,
    h: In = None,
    factor: ReadOnly = None,
    ranges: ReadOnly = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    a_skip: Dim = 0,
    a_first: Offset[Dim] = 0,
    y_skip: Dim = 0,
    y_first: Offset[Dim] = 0,
    rank: Dim = 0,
    h_skip: Dim = 0,
    h_first: Offset[Dim] = 0,
    stride: Dim = 0,
    first_row: Offset[Dim] = 0,
    n1: Dim = 0,
    n2: Dim = 0,
    accumulate: Flag = False,
    stacked: Flag = False,
    gated: Flag = False,
    adapted_parts: Word = ALL_PARTS,
    b_type: Word = "f32",
    a_type: Word = "f32",
    form: Word = "nt",
) -> Any:
    """y[m, n] (+)= a_scale[m] sum_k a[m, k] b[n, k] (+ bias[n]) (+ h factor^T, see `adapted`); tiles entirely past row
    count[0] are skipped. stacked, gated: see ops.matmul.matrix_stack."""
    if stacked:
        c = locals()
        arrays = {name: c.pop(name) for name in matmul_nt.bindings}
        return forward_reference(
            matmul_nt, arrays, c, {"b": ([k * size for size in sizes(c, "n")], ITEM_BYTES[b_type])}
        )
    left, (result, part) = _range(a, m, a_first, k)[1], _range(y.copy(), m, y_first, n)
    product = operand(left, m, k, a_scale) @ b.reshape(n, k).T
    product = product + adapted(h, factor, ranges, m, n, rank, h_first, stride, first_row, form)
    part[:] = finish(part, product, accumulate, None if bias is None else bias[y_first : y_first + n])
    return result


@kernel(
    FILE, grid=tile_grid, variants=WIDE, specialise=divisibility, layout=product_layout, tuning=DENSE, part=DENSE_PART
)
def matmul_nn(
    a: In,
    b: ReadOnly,
    y: InOut,
    row_scale: In = None,
    count: ReadOnly = None,
    a_scale: In = None,
    h: In = None,
    factor: ReadOnly = None,
    ranges: ReadOnly = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    a_skip: Dim = 0,
    a_first: Offset[Dim] = 0,
    y_skip: Dim = 0,
    y_first: Offset[Dim] = 0,
    rank: Dim = 0,
    h_skip: Dim = 0,
    h_first: Offset[Dim] = 0,
    stride: Dim = 0,
    first_row: Offset[Dim] = 0,
    k1: Dim = 0,
    k2: Dim = 0,
    accumulate: Flag = False,
    stacked: Flag = False,
    b_type: Word = "f32",
    a_type: Word = "f32",
    form: Word = "nn",
) -> Any:
    """y[m, n] (+)= a_scale[m] sum_k a[m, k] b[k, n] (+ h factor, see `adapted`); with row_scale, y[m] is scaled by
    row_scale[m] first. stacked: see ops.matmul.matrix_stack."""
    if stacked:
        c = locals()
        arrays = {name: c.pop(name) for name in matmul_nn.bindings}
        return backward_reference(
            matmul_nn, arrays, c, {"b": ([n * size for size in sizes(c, "k")], ITEM_BYTES[b_type])}
        )
    left, (result, part) = _range(a, m, a_first, k)[1], _range(y.copy(), m, y_first, n)
    product = operand(left, m, k, a_scale) @ b.reshape(k, n)
    product = product + adapted(h, factor, ranges, m, n, rank, h_first, stride, first_row, form)
    part[:] = finish(part, product, accumulate, None, row_scale)
    return result


def _slot_rows(ranges: np.ndarray, first_row: int, count: int) -> np.ndarray:
    """Each slot's rows [start, stop) among the batch's rows [first_row, first_row + count)."""
    return (ranges.reshape(-1, 2).astype(int) - first_row).clip(0, count)


def _by_slot(y: Columns, ranges: np.ndarray, first_row: int, product: Any, accumulate: bool) -> np.ndarray:
    """y, a `_range`, with the product of each slot's rows; rows without a slot are unchanged."""
    whole, columns = y
    for slot, (start, stop) in enumerate(_slot_rows(ranges, first_row, len(columns))):
        rows = slice(start, stop)
        columns[rows] = (columns[rows] if accumulate else 0) + product(slot, rows)
    return whole


def _scales_of_columns(scale: Any, slots: int, n: int, y_skip: int, y_first: int) -> Any:
    return np.ones((slots, n)) if scale is None else scale.reshape(slots, n + y_skip)[:, y_first : y_first + n]


@kernel(FILE, grid=tile_grid, variants=THIN, specialise=divisibility, layout=product_layout, tuning=LoraTuning())
def lora_nt(
    a: In,
    b: ReadOnly,
    y: InOut,
    ranges: ReadOnly,
    scale: ReadOnly = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    slots: U32,
    stride: Dim,
    first_row: Offset[Dim] = 0,
    a_skip: Dim = 0,
    a_first: Offset[Dim] = 0,
    y_skip: Dim = 0,
    y_first: Offset[Dim] = 0,
    accumulate: Flag = False,
    b_type: Word = "f32",
    form: Word = "nt",
) -> Any:
    """y[t] (+)= scale[s] b[s] a[t], s the slot of row t, b[s] [n, k] at s * stride; rows without a slot are unchanged.

    `ranges` counts rows of the batch; a and y hold those from first_row on. scale[s] has a value per column of y."""
    result, left = y.copy(), _range(a, m, a_first, k)[1]
    scales = _scales_of_columns(scale, slots, n, y_skip, y_first)

    def product(s: int, rows: slice) -> Any:
        return scales[s] * (left[rows] @ b.reshape(-1)[s * stride :][: n * k].reshape(n, k).T)

    return _by_slot(_range(result, m, y_first, n), ranges, first_row, product, accumulate)


@kernel(FILE, grid=tile_grid, variants=THIN, specialise=divisibility, layout=product_layout, tuning=LoraTuning())
def lora_nn(
    a: In,
    b: ReadOnly,
    y: InOut,
    ranges: ReadOnly,
    scale: ReadOnly = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    slots: U32,
    stride: Dim,
    first_row: Offset[Dim] = 0,
    a_skip: Dim = 0,
    a_first: Offset[Dim] = 0,
    y_skip: Dim = 0,
    y_first: Offset[Dim] = 0,
    accumulate: Flag = False,
    b_type: Word = "f32",
    form: Word = "nn",
) -> Any:
    """y[t] (+)= scale[s] b[s]^T a[t], s the slot of row t, b[s] [k, n] at s * stride; other rows are unchanged."""
    result, left = y.copy(), _range(a, m, a_first, k)[1]
    scales = _scales_of_columns(scale, slots, n, y_skip, y_first)

    def product(s: int, rows: slice) -> Any:
        return scales[s] * (left[rows] @ b.reshape(-1)[s * stride :][: n * k].reshape(k, n))

    return _by_slot(_range(result, m, y_first, n), ranges, first_row, product, accumulate)


@kernel(FILE, grid=tile_grid, variants=THIN, specialise=divisibility, layout=product_layout, tuning=LoraTuning("k"))
def lora_tn(
    a: In,
    b: In,
    y: InOut,
    ranges: ReadOnly,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    slots: U32,
    stride: Dim,
    first_row: Offset[Dim] = 0,
    a_skip: Dim = 0,
    a_first: Offset[Dim] = 0,
    b_skip: Dim = 0,
    b_first: Offset[Dim] = 0,
    accumulate: Flag = True,
    b_type: Word = "f32",
    form: Word = "tn",
) -> Any:
    """y[s] [m, n] at s * stride (+)= sum over slot s's rows t of a[t, m] b[t, n], a factor's gradient."""
    result, left, right = y.reshape(-1).copy(), _range(a, k, a_first, m)[1], _range(b, k, b_first, n)[1]
    for slot, (start, stop) in enumerate(_slot_rows(ranges, first_row, k)):
        product, own = (left[start:stop].T @ right[start:stop]).reshape(-1), result[slot * stride :][: m * n]
        own[:] = product + (own if accumulate else 0)
    return result
