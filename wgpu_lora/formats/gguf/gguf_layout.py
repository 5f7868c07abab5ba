"""How GGUF files arrange the values of a parameter, where they do not do so as checkpoints do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_NEAR = 16  # rows that are this close are read together
_TINY = np.finfo(np.float32).tiny


class Order(Protocol):
    def index(self, count: int) -> np.ndarray:
        """For each of `count` places in the file, the place in a checkpoint whose value is there."""
        ...


@dataclass(frozen=True)
class InterleavedHalves:
    """The halves of each head are interleaved, so that the pairs that are rotated are neighbours."""

    heads: int

    def index(self, count: int) -> np.ndarray:
        return np.arange(count).reshape(self.heads, 2, -1).swapaxes(1, 2).ravel()


@dataclass(frozen=True)
class Tiled:
    """Value heads, which are in groups by their key head, are dealt out: the first of each group, then the second...

    start: places before the heads, which stay.
    """

    groups: int
    heads: int
    start: int = 0

    def index(self, count: int) -> np.ndarray:
        heads = np.arange(self.start, count).reshape(self.groups, self.heads // self.groups, -1)
        return np.concatenate([np.arange(self.start), heads.swapaxes(0, 1).ravel()])


@dataclass(frozen=True)
class Layout:
    """The order of rows and of columns, and what is done to the values.

    offset: added to them.
    negative_exp: the file has -exp(value) where a checkpoint has a logarithm; at least _TINY, so that one is left.
    """

    rows: Order | None = None
    columns: Order | None = None
    offset: float = 0.0
    negative_exp: bool = False

    @property
    def changes_values(self) -> bool:
        return self.negative_exp or self.offset != 0

    def row_index(self, count: int) -> np.ndarray:
        """The checkpoint's row for each row of the file."""
        return self.rows.index(count) if self.rows else np.arange(count)

    def column_index(self, count: int) -> np.ndarray | None:
        """The same of columns; None if these have the checkpoint's order."""
        return self.columns.index(count) if self.columns else None

    def file_rows(self, rows: np.ndarray) -> np.ndarray:
        """Rows for the file, float32, from such of a checkpoint that have the file's order."""
        index = self.column_index(rows.shape[1]) if rows.ndim > 1 else None
        rows = rows if index is None else rows[:, index]
        if self.negative_exp:
            with np.errstate(over="ignore"):
                rows = -np.maximum(np.exp(rows), _TINY)
        return np.ascontiguousarray(rows + np.float32(self.offset) if self.offset else rows)

    def values(self, rows: np.ndarray) -> np.ndarray:
        """A checkpoint's values, float32, of rows as the file has them, in the file's order of columns."""
        with np.errstate(all="ignore"):  # AuditedSource reports values that are not finite
            rows = np.log(-rows) if self.negative_exp else rows
        return rows - np.float32(self.offset) if self.offset else rows

    def columns_back(self, rows: np.ndarray) -> np.ndarray:
        """Rows of the file with the checkpoint's order of columns."""
        index = self.column_index(rows.shape[1]) if rows.ndim > 1 else None
        return rows if index is None else rows[:, np.argsort(index)]


PLAIN_LAYOUT = Layout()


def file_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A parameter's shape in a file: weights of a depthwise convolution [channels, 1, taps] are a matrix."""
    return shape if len(shape) < 3 else (shape[0], shape[-1])


def read_rows_in_order(read: Callable[[int, int], np.ndarray], rows: np.ndarray) -> np.ndarray:
    """The given rows, in their order, by reading runs of rows: `read(start, stop)`."""
    if (np.diff(rows) == 1).all():  # the usual order, without a copy
        return read(int(rows[0]), int(rows[-1]) + 1)
    order = np.argsort(rows)
    parts = [read(start, stop)[run - start] for start, stop, run in _runs(rows[order])]
    return np.concatenate(parts)[np.argsort(order)]


def _runs(rows: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Parts of rows, which ascend: the first, the one after the last, and the rows."""
    for run in np.split(rows, np.flatnonzero(np.diff(rows) > _NEAR) + 1):
        yield int(run[0]), int(run[-1]) + 1, run
