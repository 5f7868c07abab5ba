"""What an architecture asks of a batch beyond ids and positions, and what it computes once for all batches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

NOWHERE = 0xFFFFFFFF


@dataclass(frozen=True)
class Rows:
    """Where the tokens of a batch stand, int64 [n] each; rows of a sequence follow one another.

    positions: a token's place in its sequence. sequences: which sequence. keys: the row of a per-token state where it
    lies, which without one is its row of the batch. first, last: [first, last) are the rows of that state that belong
    to its sequence; last is 0 where nothing follows yet, in generation.
    """

    positions: np.ndarray
    sequences: np.ndarray
    keys: np.ndarray
    first: np.ndarray
    last: np.ndarray

    @cached_property
    def previous(self) -> np.ndarray:
        """The batch's row that holds the token before, -1 where there is none or another batch had it."""
        row = np.arange(self.keys.size)
        follows = (self.first[1:] == self.first[:-1]) & (self.keys[1:] == self.keys[:-1] + 1)
        return np.where(np.concatenate([[False], follows]), row - 1, -1)


class RowInput(Protocol):
    """A u32 tensor that is uploaded with each batch: [T], or [T, width] where the width is over 1.

    It is its own key: equal ones are the same tensor.
    """

    @property
    def width(self) -> int: ...

    def __hash__(self) -> int: ...

    def values(self, rows: Rows) -> np.ndarray:
        """Of n <= T tokens: [n] or [n, width]."""

    def padding(self, values: np.ndarray) -> np.ndarray | int:
        """What each of the T - n rows behind them has."""


class Table(Hashable, Protocol):
    """An f32 tensor by position that never changes, such as the angles of rotary embedding. It is its own key."""

    def shape(self, positions: int) -> tuple[int, ...]: ...

    def values(self, positions: int) -> np.ndarray: ...
