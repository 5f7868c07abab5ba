"""A few tokens of the vocabulary for each row (its *support*): their logits, and products with their embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Dim, Fixed, In, InOut, Place, Word, kernel, one_per
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.embedding import Table, rows_asked_for
from wgpu_lora.ops.recorder import Recorder

LOWEST = -3.0e38  # a logit of probability 0
NO_ID = 0xFFFFFFFF  # of no token, in a row with fewer


def _here(ids: np.ndarray, count: np.ndarray, rows: int, cols: int, first: int) -> tuple[np.ndarray, ...]:
    """The places (row, s) of the ids in a chunk, and their columns."""
    columns = ids.reshape(rows, -1).astype(np.int64) - first
    used = np.arange(rows)[:, None] < int(count.reshape(-1)[0])
    row, s = np.nonzero(used & (columns >= 0) & (columns < cols))
    return row, s, columns[row, s]


@kernel("pick_logits.wgsl.j2", grid=lambda c: one_per(c.rows * c.kept), lib=("linear",))
def pick_logits(
    logits: In, ids: In, count: Fixed, picked: InOut, *, rows: Dim, kept: Dim, cols: Dim, first: Place[Dim]
) -> Any:
    """picked[r, s] = logits[r, ids[r, s] - first] for ids in [first, first + cols) and r < count[0], else unchanged."""
    row, s, column = _here(ids, count, rows, cols, first)
    result = picked.reshape(rows, kept).copy()
    result[row, s] = logits.reshape(rows, cols)[row, column]
    return result


@kernel("hide_logits.wgsl.j2", grid=lambda c: one_per(c.rows * c.kept), lib=("linear",))
def hide_logits(ids: In, count: Fixed, logits: InOut, *, rows: Dim, kept: Dim, cols: Dim, first: Place[Dim]) -> Any:
    """logits[r, ids[r, s] - first] = LOWEST for ids in [first, first + cols) and r < count[0]."""
    row, _, column = _here(ids, count, rows, cols, first)
    result = logits.reshape(rows, cols).copy()
    result[row, column] = np.float32(LOWEST)
    return result


@kernel(
    "support_product.wgsl.j2",
    grid=lambda c: one_per(c.rows * c.cols),
    lib=("linear", "half"),
    part=partial(rows_asked_for, size="size"),
)
def support_product(
    weights: In, ids: In, count: Fixed, table: Fixed, y: InOut, *, rows: U32, kept: U32, cols: U32, first: Place[U32],
    size: U32, b_type: Word = "f32",
) -> Any:  # fmt: skip
    """y[r] += sum over s of weights[r, s] table[ids[r, s] - first], for ids in [first, first + size) and r < count[0];
    ids of weight 0 are skipped."""
    row, s, at = _here(ids, count, rows, size, first)
    w = weights.reshape(rows, kept)[row, s]
    used = w != 0
    result = y.reshape(rows, cols).copy()
    np.add.at(result, row[used], w[used, None] * table.reshape(size, cols)[at[used]])
    return result


def add_support(rec: Recorder, weights: Tensor, ids: Tensor, table: Table, count: Tensor, y: Tensor) -> None:
    """y[r] += sum over s of weights[r, s] table[ids[r, s]], f32 [R, in_features], for weights and ids [R, S]."""
    rows, kept = ids.shape
    shape = {"rows": rows, "kept": kept, "cols": table.in_features, "b_type": table.dtype}
    for first, part in table.chunks():
        rec.dispatch(support_product, weights, ids, count, part, y, first=first, size=part.shape[0], **shape)
