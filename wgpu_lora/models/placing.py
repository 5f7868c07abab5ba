"""The rows of a batch that sequences take, alone or as a fork.

Two sequences that begin alike, such as a prompt with two answers, form a fork, in which the common tokens have one row
each:

    tail of the first, backwards | common tokens | tail of the second

A token of the first tail sees the rows from its own to the end of the common ones, and one of the second sees all from
the beginning of the common ones to its own. So each sees a single range of keys, and attention needs no other masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from wgpu_lora.models.rows import Rows


class Sequenced(Protocol):
    """What is placed: a sequence of tokens, of which the first `prefix` are those of the sequence before."""

    @property
    def input_ids(self) -> np.ndarray: ...

    @property
    def prefix(self) -> int: ...


class Placing:
    """Places in a batch of `size` rows; what is not placed is padding, which only sees itself."""

    def __init__(self, size: int):
        row = np.arange(size, dtype=np.int64)
        self.at, self.size = 0, size
        self.rows = Rows(
            positions=0 * row,
            sequences=row.copy(),
            keys=row,
            first=row.copy(),
            stop=row + 1,
            since=row.copy(),
            last=row + 1,
            lengths=0 * row + 1,
        )

    def add(self, sequences: Sequence[Sequenced]) -> Iterator[np.ndarray]:
        """Place sequences behind those already placed; gives the rows of each one's tokens, int64 [len].

        In a fork, the second sequence must follow the first.
        """
        following = [*[one.prefix for one in sequences[1:]], 0]
        for one, prefix in zip(sequences, following, strict=True):
            if one.prefix:
                yield self._tail(len(one.input_ids), one.prefix)
            elif prefix:
                yield self._head(len(one.input_ids), prefix)
            else:
                yield self._alone(len(one.input_ids))

    def _take(self, count: int) -> slice:
        taken = slice(self.at, self.at + count)
        assert taken.stop <= self.size, f"{taken.stop} tokens do not fit a batch of {self.size}"
        self.at = taken.stop
        return taken

    def _alone(self, length: int) -> np.ndarray:
        taken, rows = self._take(length), self.rows
        rows.positions[taken] = np.arange(length)
        rows.sequences[taken] = rows.first[taken] = taken.start
        rows.last[taken] = taken.stop
        rows.lengths[taken] = length
        return rows.keys[taken]

    def _head(self, length: int, prefix: int) -> np.ndarray:
        """The first sequence of a fork, including the common tokens."""
        taken, rows = self._take(length), self.rows
        fork = taken.stop - prefix
        own, common = slice(taken.start, fork), slice(fork, taken.stop)
        rows.positions[own], rows.positions[common] = np.arange(length)[prefix:][::-1], np.arange(prefix)
        rows.sequences[taken] = rows.since[taken] = taken.start
        rows.stop[own] = taken.stop
        rows.first[common] = fork
        rows.last[common] = taken.stop
        rows.lengths[taken] = length
        return np.concatenate([rows.keys[common], rows.keys[own][::-1]])

    def _tail(self, length: int, prefix: int) -> np.ndarray:
        """The second sequence of a fork."""
        fork, rows = self.at - prefix, self.rows
        taken = self._take(length - prefix)
        rows.positions[taken] = np.arange(prefix, length)
        rows.sequences[taken], rows.first[taken] = fork, fork
        rows.lengths[taken] = length
        rows.last[fork : taken.stop] = taken.stop
        return rows.keys[fork : taken.stop]


def extend(span: np.ndarray, start: int, stop: int) -> None:
    """Extend the range [start, stop), empty at first."""
    span[:] = (start, stop) if span[1] == 0 else (min(span[0], start), max(span[1], stop))
