"""The fit of lookup tables and group scales to a matrix on the device: what is dispatched, in order."""

from __future__ import annotations

from typing import Any

from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.weights.fit_kernels import group_largest, lut_lloyd, lut_rescale, lut_start, round_half

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
    rounds: int = ROUNDS,
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
        for _ in range(rounds):
            program.dispatch(lut_rescale, w, table, scales, importance, **shape)
            program.dispatch(lut_lloyd, w, table, scales, importance, iterations=ITERATIONS, **shape)
        program.dispatch(lut_rescale, w, table, scales, importance, **shape)
        program.dispatch(round_half, scales, size=scales.size)
        program.dispatch(lut_lloyd, w, table, scales, importance, iterations=1, **shape)
    program.dispatch(round_half, table, size=table.size)
