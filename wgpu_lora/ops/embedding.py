"""Lookups of rows: the embedding, and the LM head's rows of the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, In, InOut, Kernel, Offset, Out, ReadOnly, Word, kernel, linear_grid
from wgpu_lora.gpu.reference_values import Part
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.gpu.tiling import Arrays, Constants
from wgpu_lora.ops.recorder import Recorder

Dispatch = Callable[..., None]


@dataclass(frozen=True)
class TablePart:
    """Rows of a frozen embedding or LM head.

    product, gradient, lookup, support: the kernels of its format, as `matmul_nt`, `matmul_nn`, `embedding_rows` and
        `support_product`. tensors: the rows, by the names of bindings. constants: of the products. b_type: of all.
    """

    rows: int
    tensors: Mapping[str, Tensor]
    b_type: str
    product: Kernel
    gradient: Kernel
    lookup: Kernel
    support: Kernel
    constants: Mapping[str, int]

    def dispatch(
        self, record: Dispatch, kernel: Kernel, tensors: Mapping[str, Tensor | None], **constants: Any
    ) -> None:
        """Records a call of one of the kernels with these rows. record: the `dispatch` of a program or a recorder."""
        bound = {**self.tensors, **tensors}
        record(kernel, *(bound.get(name) for name in kernel.bindings), b_type=self.b_type, **constants)


class EmbeddingTable(Protocol):
    """A frozen embedding or LM head [out_features, in_features] in its stored format.

    cap: soft cap of the logits, 0 if there is none (`ops.embedding`).
    """

    @property
    def in_features(self) -> int: ...

    @property
    def cap(self) -> float: ...

    def chunks(self, max_rows: int | None = None) -> Iterator[tuple[int, TablePart]]:
        """Yields (first row, rows) parts of at most max_rows rows, a multiple of 128 so that offsets are aligned."""


def rows_asked_for(arrays: Arrays, c: Constants, size: str = "count") -> Part:
    """A part with only the rows of the table that the ids use, since the whole table may be gigabytes in float64.

    size: the constant that says how many rows the table has.
    """
    rows, renamed = local_rows(arrays["ids"], c["first"], c[size])
    b = arrays["b"].reshape(c[size], -1)[rows - c["first"]]
    return {**arrays, "ids": renamed, "b": b}, {**c, "first": 0, size: rows.size}


def local_rows(ids: np.ndarray, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of [first, first + count) that ids use, with the first, and the ids as their indices."""
    ids = ids.reshape(-1).astype(np.int64)
    rows = np.unique(np.append(ids[(ids >= first) & (ids < first + count)], first))
    indices = np.searchsorted(rows, ids)
    present = rows.take(indices, mode="clip") == ids
    return rows, np.where(present, indices, 0xFFFFFFFF).astype(np.uint32)


def put_rows(ids: np.ndarray, table: np.ndarray, y: np.ndarray, first: int, scale: float) -> np.ndarray:
    """y with scale table[ids[t] - first] in rows t whose id is in the table."""
    local = ids.astype(np.int64) - first
    mask = (local >= 0) & (local < len(table))
    result = y.copy()
    result[mask] = scale * table[local[mask]]
    return result


@kernel("embedding.wgsl.j2", grid=lambda c: linear_grid(c.rows * c.cols), lib=("linear", "half"), part=rows_asked_for)
def embedding_rows(
    ids: ReadOnly, b: ReadOnly, y: InOut, *, rows: U32, cols: U32, first: Offset[U32], count: U32, b_type: Word = "f32",
    scale: F32 = 1.0,
) -> Any:  # fmt: skip
    """y[t] = scale b[ids[t] - first] for ids in [first, first + count); other rows are unchanged."""
    return put_rows(ids, b.reshape(count, cols), y, first, scale)


@kernel("gather_rows.wgsl", grid=lambda c: linear_grid(c.rows * c.cols), lib=("linear",))
def gather_rows(x: In, rows_of: ReadOnly, y: InOut, *, rows: U32, cols: U32) -> Any:
    """y[r] = x[rows_of[r]], unchanged if rows_of[r] is 0xffffffff."""
    result, index = y.reshape(rows, cols).copy(), rows_of.reshape(-1).astype(np.int64)
    valid = np.flatnonzero(index != 0xFFFFFFFF)
    result[valid] = x.reshape(-1, cols)[index[valid]]
    return result


@kernel("scatter_rows.wgsl", grid=lambda c: linear_grid(c.rows * c.cols), lib=("linear",))
def scatter_rows(x: In, rows_of: ReadOnly, y: InOut, *, rows: U32, cols: U32) -> Any:
    """y[rows_of[r]] = x[r], skipped if rows_of[r] is 0xffffffff."""
    result, index = y.reshape(-1, cols).copy(), rows_of.reshape(-1).astype(np.int64)
    valid = np.flatnonzero(index != 0xFFFFFFFF)
    result[index[valid]] = x.reshape(rows, cols)[valid]
    return result


def embed(rec: Recorder, ids: Tensor, table: EmbeddingTable, name: str = "embedded", scale: float = 1.0) -> Tensor:
    """scale table[ids], f32 [T, in]. The table is frozen, so there is no backward pass."""
    rows, cols = ids.size, table.in_features
    y = rec.temp((rows, cols), name=name)
    for first, part in table.chunks():
        shape = {"rows": rows, "cols": cols, "first": first, "count": part.rows}
        part.dispatch(rec.dispatch, part.lookup, {"ids": ids, "y": y}, scale=scale, **shape)
    return y


@kernel("cap_logits.wgsl", grid=lambda c: linear_grid(c.size), lib=("linear", "tanh"))
def cap_logits(logits: InOut, *, size: U32, cap: F32) -> Any:
    """logits = cap tanh(logits / cap)."""
    return cap * np.tanh(logits / cap)


@kernel("cap_gradient.wgsl", grid=lambda c: linear_grid(c.size), lib=("linear",))
def cap_gradient(x: In, logits: In, y: Out, *, size: U32, cap: F32) -> Any:
    """y = x (1 - (logits / cap)^2): the derivatives x by capped logits, by those before the cap."""
    return np.where(x == 0, 0.0, x * (1 - (logits / cap) ** 2))


def head_logits(
    dispatch: Dispatch,
    x: Tensor,
    head: EmbeddingTable,
    part: TablePart,
    logits: Tensor,
    count: Tensor | None = None,
    scale: Tensor | None = None,
    kind: str = "f32",
) -> None:
    """Records logits [T, rows of the part] of hidden states x [T, in] by a part of the LM head.

    Args:
        dispatch: of a program or a recorder.
        count: u32 [1], the rows of x that are used.
        scale, kind: of x, if it is rounded (`half_precision.head_operand`).
    """
    shape = {"m": x.size // head.in_features, "n": part.rows, "k": head.in_features, "a_type": kind, **part.constants}
    part.dispatch(dispatch, part.product, {"a": x, "y": logits, "count": count, "a_scale": scale}, **shape)
    if head.cap:
        dispatch(cap_logits, logits, size=logits.size, cap=head.cap)
