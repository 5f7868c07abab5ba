"""A few tokens of the vocabulary for each row (its *support*): their logits, and products with their embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Dim, In, InOut, Offset, ReadOnly, Word, by_subgroup, kernel, linear_grid, row_grid
from wgpu_lora.gpu.reference_values import Part, evenly_spaced, select_rows
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.gpu.tiling import Arrays, Constants
from wgpu_lora.ops.embedding import EmbeddingTable, rows_asked_for
from wgpu_lora.ops.recorder import Recorder

LOWEST = -3.0e38  # a logit of probability 0
NO_ID = 0xFFFFFFFF  # of no token, in a row with fewer


def _coordinates(ids: np.ndarray, count: np.ndarray, rows: int, cols: int, first: int) -> tuple[np.ndarray, ...]:
    """The places (row, s) of the ids in a chunk, and their columns."""
    columns = ids.reshape(rows, -1).astype(np.int64) - first
    valid = np.arange(rows)[:, None] < int(count.reshape(-1)[0])
    row, s = np.nonzero(valid & (columns >= 0) & (columns < cols))
    return row, s, columns[row, s]


@kernel("pick_logits.wgsl.j2", grid=lambda c: linear_grid(c.rows * c.kept), lib=("linear",))
def pick_logits(
    logits: In, ids: In, count: ReadOnly, picked: InOut, *, rows: Dim, kept: Dim, cols: Dim, first: Offset[Dim]
) -> Any:
    """picked[r, s] = logits[r, ids[r, s] - first] for ids in [first, first + cols) and r < count[0], else unchanged."""
    row, s, column = _coordinates(ids, count, rows, cols, first)
    result = picked.reshape(rows, kept).copy()
    result[row, s] = logits.reshape(rows, cols)[row, column]
    return result


@kernel("hide_logits.wgsl.j2", grid=lambda c: linear_grid(c.rows * c.kept), lib=("linear",))
def hide_logits(ids: In, count: ReadOnly, logits: InOut, *, rows: Dim, kept: Dim, cols: Dim, first: Offset[Dim]) -> Any:
    """logits[r, ids[r, s] - first] = LOWEST for ids in [first, first + cols) and r < count[0]."""
    row, _, column = _coordinates(ids, count, rows, cols, first)
    result = logits.reshape(rows, cols).copy()
    result[row, column] = np.float32(LOWEST)
    return result


@kernel(
    "support_product.wgsl.j2",
    grid=lambda c: linear_grid(c.rows * c.cols),
    lib=("linear", "half"),
    part=partial(rows_asked_for, size="size"),
)
def support_product(
    weights: In, ids: In, count: ReadOnly, b: ReadOnly, y: InOut, *, rows: U32, kept: U32, cols: U32,
    first: Offset[U32],
    size: U32, b_type: Word = "f32",
) -> Any:  # fmt: skip
    """y[r] += sum over s of weights[r, s] b[ids[r, s] - first], for ids in [first, first + size) and r < count[0];
    ids of weight 0 are skipped."""
    return add_rows(weights, ids, count, b.reshape(size, cols), y, rows, first)


def add_rows(
    weights: np.ndarray, ids: np.ndarray, count: np.ndarray, table: np.ndarray, y: np.ndarray, rows: int, first: int
) -> np.ndarray:
    """The reference of `support_product`, with a table [size, cols]."""
    row, s, at = _coordinates(ids, count, rows, len(table), first)
    w = weights.reshape(rows, -1)[row, s]
    nonzero = w != 0
    result = y.reshape(rows, -1).copy()
    np.add.at(result, row[nonzero], w[nonzero, None] * table[at[nonzero]])
    return result


def add_support(rec: Recorder, weights: Tensor, ids: Tensor, table: EmbeddingTable, count: Tensor, y: Tensor) -> None:
    """y[r] += sum over s of weights[r, s] table[ids[r, s]], f32 [R, in_features], for weights and ids [R, S]."""
    rows, support = ids.shape
    shape = {"rows": rows, "kept": support, "cols": table.in_features}
    tensors = {"weights": weights, "ids": ids, "count": count, "y": y}
    for first, part in table.chunks():
        part.dispatch(rec.dispatch, part.support, tensors, first=first, size=part.rows, **shape)


PART_ROWS = 64  # calls with more rows are checked in part


def _sample_rows(arrays: Arrays, c: Constants) -> Part | None:
    if c["rows"] <= PART_ROWS:
        return None
    rows = evenly_spaced(c["rows"], PART_ROWS)
    return select_rows(arrays, "logits values ids best best_ids", c["rows"], rows), {**c, "rows": rows.size}


@kernel("top_k.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup, part=_sample_rows)
def top_k(
    logits: In,
    count: ReadOnly,
    values: In,
    ids: In,
    best: InOut,
    best_ids: InOut,
    *,
    rows: Dim,
    k: Dim,
    cols: Dim,
    first: Offset[Dim],
) -> Any:
    """The K largest of a chunk's logits [rows, cols] and the min(K, first) largest before it, ordered by id.

    values and ids[r, :min(K, first)] are those of the logits [0, first), by id. best and best_ids[r, :min(K, first +
    cols)] become those of [0, first + cols); of equal ones, those of lower ids. The rest of a row, and rows >=
    count[0], are unchanged.
    """
    result, result_ids = best.reshape(rows, k).copy(), best_ids.reshape(rows, k).copy()
    old, size = min(k, first), min(k, first + cols)
    for r in range(min(rows, int(count.reshape(-1)[0]))):
        candidates = np.concatenate([values.reshape(rows, k)[r, :old], logits.reshape(rows, cols)[r]])
        of = np.concatenate([ids.reshape(rows, k)[r, :old], first + np.arange(cols)])
        order = np.sort(np.argsort(-candidates, kind="stable")[:size])  # the ids ascend
        result[r, :size], result_ids[r, :size] = candidates[order], of[order]
    return result, result_ids
