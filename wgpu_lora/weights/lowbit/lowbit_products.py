"""Kernels of the products with matrices of low-bit codes, forward and input gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Dim, Flag, In, InOut, Offset, ReadOnly, Variants, Word, kernel
from wgpu_lora.gpu.tensor import ITEM_BYTES, Tensor
from wgpu_lora.gpu.tiling import Arrays, Capabilities, Constants, Tiling
from wgpu_lora.ops.linear.frozen_product import FrozenProduct
from wgpu_lora.ops.matmul.matmul import FILE, adapted, divisibility, finish, operand, tile_grid
from wgpu_lora.ops.matmul.matmul_layout import product_layout
from wgpu_lora.ops.matmul.matmul_tuning import FEW_ROWS, MatmulTuning, product_part, tilings
from wgpu_lora.ops.matmul.matrix_stack import ALL_PARTS, backward_reference, forward_reference, region, sizes
from wgpu_lora.weights.lowbit.lowbit_layout import constant_count, decode_device, scale_count, table_size, word_rows

NUMPY = {"f16": np.float16, "f32": np.float32}


def _facts(c: Any) -> dict[str, bool]:
    """Whether a's rows are whole rounds of 8 steps, and whether the number of b's rows is even."""
    return divisibility(c) | {
        "octets": c.form == "nt" and c.k % 8 == 0,
        "even_k": c.form == "nn" and all(k % 2 == 0 for k in sizes(vars(c), "k")),
    }


def _shapes(c: Constants) -> list[tuple[int, int]]:
    """The shapes (out, in) of W's parts."""
    if c["form"] == "nt":
        return [(n, c["k"]) for n in sizes(c, "n")]
    return [(k, c["n"]) for k in sizes(c, "k")]


def _of_parts(c: Constants) -> dict[str, tuple[list[int], int]]:
    """The numbers of codes and constants of a stack's parts, and bytes of each."""
    shapes = _shapes(c)
    words = [word_rows(size_in, c["bits"]) * out for out, size_in in shapes]
    constants = [constant_count(*shape, c["bits"], c["group"]) for shape in shapes]
    return {"codes": (words, 4), "scales": (constants, ITEM_BYTES[c["c_type"]])}


def _synthetic(c: Constants, rng: np.random.Generator) -> Arrays:
    """Codes and constants of a random W [out, in] of values around 1, with random padding past the last column."""
    counts = {
        name: sum(region(n, size) for n in result) if c["stacked"] else result[0]
        for name, (result, size) in _of_parts(c).items()
    }
    codes = rng.integers(0, 2**32, counts["codes"], np.uint32)
    constants = (rng.random(counts["scales"]) + 0.5) * np.where(rng.random(counts["scales"]) < 0.5, -1, 1)
    constants /= 64 if c["bits"] == 8 else 1
    return {"codes": codes, "scales": constants.astype(NUMPY[c["c_type"]])}


def _columns(arrays: Arrays, c: Constants, columns: np.ndarray) -> Arrays | None:
    """The columns of y are rows of W forward, and whole groups and words of all rows backward."""
    bits, group, ((out, size_in),) = c["bits"], c["group"], _shapes(c)
    codes, flat, own = arrays["codes"].reshape(-1, out), arrays["scales"].reshape(-1), out * table_size(bits)
    tables = flat[:own].reshape(out, -1)
    scales = flat[own : own + out * scale_count(size_in, bits, group)].reshape(-1, out)
    if c["form"] == "nt":
        parts = [tables[columns].reshape(-1), scales[:, columns].reshape(-1)]
        return {"codes": codes[:, columns], "scales": np.concatenate(parts)}
    result, at = [], 0
    for plane in (2, 1) if bits == 3 else (bits,):
        per, count = 32 // plane, -(-size_in * plane // 32)
        result.append(codes[at : at + count][np.unique(columns // per)])
        at += count
    if group:
        scales = scales[np.unique(columns // group)]
    return {"codes": np.concatenate(result), "scales": np.concatenate([flat[:own], scales.reshape(-1)])}


def _limited(variants: Variants) -> Variants:
    """The tilings with rounds of at most one group, whose tables fit the registers."""

    def limited(capabilities: Capabilities, c: Any) -> Sequence[Tiling]:
        candidates = variants(capabilities, c)
        tiled = [tiling for tiling in candidates if tiling.shares_memory]  # whose lanes keep no tables
        untiled = _with_tables([tiling for tiling in candidates if not tiling.shares_memory], capabilities, c)
        return [*tiled, *untiled] if candidates[0].shares_memory else [*untiled, *tiled]

    return limited


def _with_tables(tilings: list[Tiling], capabilities: Capabilities, c: Any) -> list[Tiling]:
    limit = 4 if c.form == "nn" and c.m > FEW_ROWS and c.bits == 3 else 32  # faster on CPUs, too
    limit = min(limit, c.group or limit)
    result = [replace(tiling, span=min(tiling.span, limit)) for tiling in tilings]
    if capabilities.software:  # taller tiles: to decode costs more than to load, but for 3 bits
        taller = c.bits != 3 and c.m > 16
        return [replace(tiling, rows=32, cols=4) if taller and tiling.cols == 8 else tiling for tiling in result]
    if c.form != "nt":
        sums = capabilities.registers - OTHER_REGISTERS_WIDE
        return [tiling for tiling in result if not tiling.wide or tiling.rows * tiling.cols <= sums]
    tables = 8 if c.bits == 2 else table_size(c.bits) // (2 if c.c_type == "f16" else 1)  # 2 bits: scaled ones, too
    suitable = [
        tiling for tiling in result if tiling.cols * (tiling.rows + tables) + OTHER_REGISTERS <= capabilities.registers
    ]
    return suitable or result[-1:]


OTHER_REGISTERS = 52  # registers of a lane besides its sums and tables, by the compilers' table (`make gpu-compilers`)
OTHER_REGISTERS_WIDE = 68  # backward, with 64-bit loads
SHAPES = ((16, 4), (16, 2), (8, 4))  # (rows, columns per lane) of the tilings
TUNING, PART = MatmulTuning(_synthetic), product_part(_columns)


@kernel(
    FILE,
    grid=tile_grid,
    variants=_limited(tilings(8, *SHAPES)),
    specialise=_facts,
    layout=product_layout,
    tuning=TUNING,
    part=PART,
)
def codes_matmul(
    a: In,
    codes: ReadOnly,
    scales: In,
    y: InOut,
    bias: ReadOnly = None,
    a_scale: In = None,
    h: In = None,
    factor: ReadOnly = None,
    ranges: ReadOnly = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    rank: Dim = 0,
    h_skip: Dim = 0,
    h_first: Offset[Dim] = 0,
    stride: Dim = 0,
    first_row: Offset[Dim] = 0,
    n1: Dim = 0,
    n2: Dim = 0,
    bits: U32 = 4,
    group: U32 = 32,
    accumulate: Flag = False,
    stacked: Flag = False,
    gated: Flag = False,
    adapted_parts: Word = ALL_PARTS,
    b_type: Word = "codes",
    a_type: Word = "f32",
    c_type: Word = "f16",
    form: Word = "nt",
) -> Any:
    """y[m, n] (+)= a_scale[m] sum_k a[m, k] W[n, k] (+ bias[n]) (+ h factor^T, see `adapted`) for a W[n, k] of codes
    of `bits` bits, see lowbit_layout.decode_device. stacked, gated: see ops.matmul.matrix_stack."""
    if stacked:
        c = locals()
        arrays = {name: c.pop(name) for name in codes_matmul.bindings}
        return forward_reference(codes_matmul, arrays, c, _of_parts(c))
    product = operand(a, m, k, a_scale) @ decode_device(codes, scales, (n, k), bits, group).T
    product = product + adapted(h, factor, ranges, m, n, rank, h_first, stride, first_row, form)
    return finish(y.reshape(m, n), product, accumulate, bias)


@kernel(
    FILE,
    grid=tile_grid,
    variants=_limited(tilings(4, *SHAPES, cpu_span=8)),
    specialise=_facts,
    layout=product_layout,
    tuning=TUNING,
    part=PART,
)
def codes_matmul_backward(
    a: In,
    codes: ReadOnly,
    scales: In,
    y: InOut,
    a_scale: In = None,
    h: In = None,
    factor: ReadOnly = None,
    ranges: ReadOnly = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    rank: Dim = 0,
    h_skip: Dim = 0,
    h_first: Offset[Dim] = 0,
    stride: Dim = 0,
    first_row: Offset[Dim] = 0,
    k1: Dim = 0,
    k2: Dim = 0,
    bits: U32 = 4,
    group: U32 = 32,
    accumulate: Flag = False,
    stacked: Flag = False,
    b_type: Word = "codes",
    a_type: Word = "f32",
    c_type: Word = "f16",
    form: Word = "nn",
) -> Any:
    """dx[m, n] (+)= a_scale[m] sum_k dy[m, k] W[k, n] (+ h factor, see `adapted`) for a W[k, n] of codes, from the same
    words as forward. stacked: see ops.matmul.matrix_stack."""
    if stacked:
        c = locals()
        arrays = {name: c.pop(name) for name in codes_matmul_backward.bindings}
        return backward_reference(codes_matmul_backward, arrays, c, _of_parts(c))
    product = operand(a, m, k, a_scale) @ decode_device(codes, scales, (k, n), bits, group)
    product = product + adapted(h, factor, ranges, m, n, rank, h_first, stride, first_row, form)
    return finish(y.reshape(m, n), product, accumulate)


def codes_product(
    outs: tuple[int, ...], in_features: int, bits: int, group: int, codes: Tensor, constants: Tensor
) -> FrozenProduct:
    """The product with matrices of codes of these numbers of rows, stored together."""
    kind = {"bits": bits, "group": group, "c_type": constants.dtype}
    tensors = {"codes": codes, "scales": constants}
    return FrozenProduct(outs, in_features, codes_matmul, codes_matmul_backward, lambda rec: tensors, kind)
