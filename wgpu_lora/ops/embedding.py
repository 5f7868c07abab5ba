"""Rows of a table: the embedding, and the LM head's rows of the targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from wgpu_lora.gpu.kernel import U32, Fixed, In, InOut, Word, kernel, one_per
from wgpu_lora.gpu.part import Part
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.gpu.tunable import Arrays, Constants
from wgpu_lora.ops.recorder import Recorder


class Table(Protocol):
    """Frozen rows [out_features, in_features], as they are stored: an embedding or an LM head."""

    @property
    def in_features(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    def chunks(self, max_rows: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) pieces, none longer than max_rows (a multiple of 128, so that offsets can be bound)."""


def rows_asked_for(arrays: Arrays, c: Constants) -> Part:
    """The rows of the table that the ids name, and no others: all of it may be gigabytes once widened."""
    ids, first = arrays["ids"].reshape(-1).astype(np.int64), c["first"]
    used = np.unique(np.append(ids[(ids >= first) & (ids < first + c["count"])], first))
    places = np.searchsorted(used, ids)
    known = used.take(places, mode="clip") == ids
    renamed = np.where(known, places, 0xFFFFFFFF).astype(np.uint32)
    table = arrays["table"].reshape(c["count"], -1)[used - first]
    return {**arrays, "ids": renamed, "table": table}, {**c, "first": 0, "count": used.size}


@kernel("embedding.wgsl.j2", grid=lambda c: one_per(c.rows * c.cols), lib=("linear", "half"), part=rows_asked_for)
def embedding_rows(
    ids: Fixed, table: Fixed, y: InOut, *, rows: U32, cols: U32, first: U32, count: U32, b_type: Word = "f32"
) -> Any:
    """y[t] = table[ids[t] - first] for the ids in [first, first + count); other rows are left alone."""
    local = ids.astype(np.int64) - first
    here = (local >= 0) & (local < count)
    result = y.copy()
    result[here] = table.reshape(count, cols)[local[here]]
    return result


@kernel("gather_rows.wgsl", grid=lambda c: one_per(c.rows * c.cols), lib=("linear",))
def gather_rows(x: In, rows_of: Fixed, y: InOut, *, rows: U32, cols: U32) -> Any:
    """y[r] = x[rows_of[r]]; a row number of 0xffffffff leaves the row alone."""
    result, index = y.reshape(rows, cols).copy(), rows_of.reshape(-1).astype(np.int64)
    used = np.flatnonzero(index != 0xFFFFFFFF)
    result[used] = x.reshape(-1, cols)[index[used]]
    return result


@kernel("scatter_rows.wgsl", grid=lambda c: one_per(c.rows * c.cols), lib=("linear",))
def scatter_rows(x: In, rows_of: Fixed, y: InOut, *, rows: U32, cols: U32) -> Any:
    """y[rows_of[r]] = x[r]; a row number of 0xffffffff means nowhere."""
    result, index = y.reshape(-1, cols).copy(), rows_of.reshape(-1).astype(np.int64)
    used = np.flatnonzero(index != 0xFFFFFFFF)
    result[index[used]] = x.reshape(rows, cols)[used]
    return result


def embed(rec: Recorder, ids: Tensor, table: Table, name: str = "embedded") -> Tensor:
    """table[ids]: [T, in]. The table is frozen, so no gradient passes."""
    rows, cols = ids.size, table.in_features
    y = rec.temp((rows, cols), name=name)
    for first, chunk in table.chunks():
        rec.dispatch(
            embedding_rows, ids, chunk, y, rows=rows, cols=cols, first=first, count=chunk.shape[0], b_type=table.dtype
        )
    return y
