"""Quantises matrices to low-bit codes on the device, piece by piece while they are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.weights.base import PIECE_BYTES, Loading, MatrixSource, read, write
from wgpu_lora.weights.lowbit.kmeans_kernels import (
    group_largest,
    lowbit_encode,
    lut_lloyd,
    lut_rescale,
    lut_start,
    round_half,
)
from wgpu_lora.weights.lowbit.lowbit_layout import scale_count, table_size

LARGEST = 65504.0  # of f16


def packing_scratch(shape: tuple[int, int], bits: int, group: int) -> Mapping[str, int]:
    """Sizes, in f32 values, of the scratch tensors that `pack_lowbit` uses, by name."""
    _, size_in = shape
    _, rows = next(_pieces(shape))
    result = {"staging": rows * size_in, "importance": size_in}
    sizes = {"fit_table": rows * table_size(bits), "fit_scales": rows * scale_count(size_in, bits, group)}
    return result | {name: size for name, size in sizes.items() if size}


def pack_lowbit(
    loading: Loading,
    source: MatrixSource,
    name: str,
    codes: Tensor,
    shape: tuple[int, int],
    bits: int,
    group: int,
    importance: np.ndarray | None = None,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Fits the tensor `name` of a checkpoint and writes its codes.

    Args:
        codes: u32 [word_rows, out], allocated (see `lowbit_layout`).
        shape: (out, in).
        importance: of each input, [in] and at least 0, such as the mean square of activations; None: all are alike.

    Returns:
        (table [out, 2^bits] or None, scales [groups, out] or None), float32 with values of f16.

    Raises:
        UserError: a value is out of f16's range.
    """
    out, size_in = shape
    device, count = loading.device, scale_count(size_in, bits, group)
    important = None
    if importance is not None:
        important = replace(loading.scratch["importance"], shape=(size_in,))
        mean = float(importance.mean()) or 1.0
        write(device, important, (importance / mean).astype(np.float32))
    tables, scales = np.empty((out, table_size(bits)), np.float32), np.empty((count, out), np.float32)
    for first, rows in _pieces(shape):
        staging = replace(loading.scratch["staging"], shape=(rows, size_in))
        write(device, staging, source.read_f32(name, first, first + rows))
        table = replace(loading.scratch["fit_table"], shape=(rows, table_size(bits))) if table_size(bits) else None
        own = replace(loading.scratch["fit_scales"], shape=(rows, count)) if count else None
        program = Program(device, "pack")
        record_packing(program, staging, codes, table, own, important, first=first, out=out, bits=bits, group=group)
        with loading.run(program):
            if table:
                tables[first : first + rows] = read(device, table)
            if own:
                scales[:, first : first + rows] = read(device, own).T
    result = [values if values.size else None for values in (tables, scales)]
    finite = all((np.abs(values) <= LARGEST).all() for values in result if values is not None)
    if not finite and np.isfinite(source.read_f32(name)).all():  # models.loaded_model reports other values
        raise UserError(f"{name} has values that f16 cannot hold: quantise this model to nf4 instead.")
    return result[0], result[1]


def record_packing(
    program: Program,
    w: Tensor,
    codes: Tensor,
    table: Tensor | None,
    scales: Tensor | None,
    importance: Tensor | None,
    *,
    first: int,
    out: int,
    bits: int,
    group: int,
) -> None:
    """Records the fit of w f32 [rows, in], which are the matrix's rows from `first` on, and the writing of its codes.

    Args:
        codes: of all `out` rows. table: f32 [rows, 2^bits], None for 8 bits. scales: f32 [rows, in / group] or, in
            group 0 of 8 bits, [rows, 1].
    """
    rows, size_in = w.shape
    if table:
        record_fit(program, w, table, scales, importance, group=group, bits=bits)
    elif scales:
        program.dispatch(group_largest, w, scales, size=scales.size, group=group or size_in, levels=127.0)
        program.dispatch(round_half, scales, size=scales.size)
    constants: dict[str, Any] = {"rows": rows, "first": first, "out": out, "size_in": size_in}
    program.dispatch(lowbit_encode, w, codes, table, scales, group=group, bits=bits, **constants)


def _pieces(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yields (first row, rows), the largest first."""
    out, size_in = shape
    step = max(1, PIECE_BYTES // (4 * size_in))
    for first in range(0, out, step):
        yield first, min(step, out - first)


START_ITERATIONS = 4  # of k-means, from the histogram's centres
ROUNDS, ITERATIONS = 2, 2  # of scales and k-means in turn, and iterations in each


def record_fit(
    program: Program,
    w: Tensor,
    table: Tensor,
    scales: Tensor | None,
    importance: Tensor | None,
    *,
    group: int,
    bits: int,
) -> None:
    """Records the fit of `table` f32 [rows, 2^bits] and `scales` f32 [rows, in / group] to w f32 [rows, in].

    Each step lowers the error sum(importance (w - scale table[code])^2) or leaves it as it is, until the results are
    rounded to f16 at the end. Rows do not depend on each other, so a matrix may be fitted piece by piece.

    Args:
        scales: None if the table alone represents a row (group 0).
        importance: of each input, f32 [in] and at least 0; None: all are 1.
    """
    rows, size_in = w.shape
    shape: dict[str, Any] = {"rows": rows, "size_in": size_in, "group": group, "bits": bits}
    if scales is not None:
        program.dispatch(group_largest, w, scales, size=rows * size_in // group, group=group)
    program.dispatch(lut_start, w, table, scales, importance, **shape)
    program.dispatch(lut_lloyd, w, table, scales, importance, iterations=START_ITERATIONS, **shape)
    if scales is not None:
        for _ in range(ROUNDS):
            program.dispatch(lut_rescale, w, table, scales, importance, **shape)
            program.dispatch(lut_lloyd, w, table, scales, importance, iterations=ITERATIONS, **shape)
        program.dispatch(lut_rescale, w, table, scales, importance, **shape)
        program.dispatch(round_half, scales, size=scales.size)
        program.dispatch(lut_lloyd, w, table, scales, importance, iterations=1, **shape)
    program.dispatch(round_half, table, size=table.size)
