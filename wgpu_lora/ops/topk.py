"""The largest logits of each row, in a sweep over chunks of the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import Dim, Fixed, In, InOut, Place, kernel
from wgpu_lora.gpu.part import Part, picks, some_rows
from wgpu_lora.gpu.tunable import Arrays, Constants
from wgpu_lora.ops.rows import by_subgroup, row_grid

PART_ROWS = 64  # calls with more rows are checked in part


def _some(arrays: Arrays, c: Constants) -> Part | None:
    if c["rows"] <= PART_ROWS:
        return None
    picked = picks(c["rows"], PART_ROWS)
    return some_rows(arrays, "logits values ids best best_ids", c["rows"], picked), {**c, "rows": picked.size}


@kernel("top_k.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup, part=_some)
def top_k(
    logits: In,
    count: Fixed,
    values: In,
    ids: In,
    best: InOut,
    best_ids: InOut,
    *,
    rows: Dim,
    k: Dim,
    cols: Dim,
    first: Place[Dim],
) -> Any:
    """The K largest of a chunk's logits [rows, cols] and the min(K, first) largest before it, ordered by id.

    values and ids[r, :min(K, first)] are those of the logits [0, first), by id. best and best_ids[r, :min(K, first +
    cols)] become those of [0, first + cols); of equal ones, those of lower ids. The rest of a row, and rows >=
    count[0], are unchanged.
    """
    result, result_ids = best.reshape(rows, k).copy(), best_ids.reshape(rows, k).copy()
    old, size = min(k, first), min(k, first + cols)
    for r in range(min(rows, int(count.reshape(-1)[0]))):
        both = np.concatenate([values.reshape(rows, k)[r, :old], logits.reshape(rows, cols)[r]])
        of = np.concatenate([ids.reshape(rows, k)[r, :old], first + np.arange(cols)])
        kept = np.sort(np.argsort(-both, kind="stable")[:size])  # the ids ascend
        result[r, :size], result_ids[r, :size] = both[kept], of[kept]
    return result, result_ids
