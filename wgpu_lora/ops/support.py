"""Logits of a few tokens of the vocabulary, which differ from row to row (their *support*), in a sweep over its chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Fixed, In, InOut, Place, kernel, one_per

LOWEST = -3.0e38  # a logit of probability 0
NO_ID = 0xFFFFFFFF  # of no token, in a row with fewer


def _here(ids: np.ndarray, count: np.ndarray, rows: int, cols: int, first: int) -> tuple[np.ndarray, ...]:
    """The places (row, s) of the ids in a chunk, and their columns."""
    columns = ids.reshape(rows, -1).astype(np.int64) - first
    used = np.arange(rows)[:, None] < int(count.reshape(-1)[0])
    row, s = np.nonzero(used & (columns >= 0) & (columns < cols))
    return row, s, columns[row, s]


@kernel("pick_logits.wgsl", grid=lambda c: one_per(c.rows * c.kept), lib=("linear",))
def pick_logits(
    logits: In, ids: In, count: Fixed, picked: InOut, *, rows: U32, kept: U32, cols: U32, first: Place[U32]
) -> Any:
    """picked[r, s] = logits[r, ids[r, s] - first] for ids in [first, first + cols) and r < count[0]; others are unchanged."""
    row, s, column = _here(ids, count, rows, cols, first)
    result = picked.reshape(rows, kept).copy()
    result[row, s] = logits.reshape(rows, cols)[row, column]
    return result


@kernel("hide_logits.wgsl", grid=lambda c: one_per(c.rows * c.kept), lib=("linear",))
def hide_logits(ids: In, count: Fixed, logits: InOut, *, rows: U32, kept: U32, cols: U32, first: Place[U32]) -> Any:
    """logits[r, ids[r, s] - first] = LOWEST for ids in [first, first + cols) and r < count[0]."""
    row, _, column = _here(ids, count, rows, cols, first)
    result = logits.reshape(rows, cols).copy()
    result[row, column] = np.float32(LOWEST)
    return result
