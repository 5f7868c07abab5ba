"""Inputs that an architecture may ask for: per batch (`RowInput`), and per position (`PositionTable`)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

NOWHERE = 0xFFFFFFFF


@dataclass(frozen=True)
class Rows:
    """The places of a batch's tokens, int64 [n] each. The rows of a sequence are consecutive.

    positions: position in the sequence.
    sequences: index of the sequence.
    keys: row in per-token state (`models.kv_cache`); without state, the row of the batch.
    first, stop: the token sees the rows [first, stop) in per-token state.
    lengths: tokens of the sequence; in generation, of what there is so far.
    first_viewer, last_viewer: of the rows [first_viewer, last_viewer), those that are not in [first, keys) see the
    token. In generation, last_viewer is 0.
    """

    positions: np.ndarray
    sequences: np.ndarray
    keys: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    first_viewer: np.ndarray
    last_viewer: np.ndarray
    lengths: np.ndarray

    @classmethod
    def causal(
        cls,
        positions: np.ndarray,
        sequences: np.ndarray,
        keys: np.ndarray,
        first: np.ndarray,
        last: np.ndarray,
        lengths: np.ndarray | None = None,
    ) -> Rows:
        """Rows that see [first, keys]. last: one past the last row of the sequence. lengths: by default, up to it."""
        sequence_lengths = positions + 1 if lengths is None else lengths
        return cls(positions, sequences, keys, first, keys + 1, keys, last, sequence_lengths)

    @cached_property
    def previous(self) -> np.ndarray:
        """The batch's row of the previous token, or -1 if the batch does not have it."""
        row = np.arange(self.keys.size)
        follows = (self.first[1:] == self.first[:-1]) & (self.keys[1:] == self.keys[:-1] + 1)
        return np.where(np.concatenate([[False], follows]), row - 1, -1)


class RowInput(Protocol):
    """A u32 tensor that is uploaded with each batch: [T], or [T, width] if width > 1.

    Equal inputs share a tensor, so implementations must be hashable.
    """

    @property
    def width(self) -> int: ...

    def __hash__(self) -> int: ...

    def values(self, rows: Rows) -> np.ndarray:
        """The values of n <= T tokens: [n] or [n, width]."""

    def padding(self, values: np.ndarray) -> np.ndarray | int:
        """The value of each of the T - n padding rows, given the others."""


class PositionTable(Hashable, Protocol):
    """A constant f32 tensor by position, such as rotary angles. Equal tables share a tensor."""

    def shape(self, positions: int) -> tuple[int, ...]: ...

    def values(self, positions: int) -> np.ndarray: ...
