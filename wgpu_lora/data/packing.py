"""The order of rows in an epoch, and batches filled in that order.

All functions are pure: there is no state and no global random generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

OPEN_BINS = 32  # more would fill bins better, but change the order of rows more


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """The order of `count` rows in an epoch: int64 [count], a random permutation for (seed, epoch).

    It sorts raw Philox words, since NumPy guarantees that these never change, unlike `Generator.permutation`.
    """
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    key = np.array([seed & (2**64 - 1), epoch & (2**64 - 1)], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable").astype(np.int64)


def pack(lengths: Sequence[int], order: Sequence[int] | np.ndarray, budget: int) -> list[list[int]]:
    """Pack the rows of `order` into bins of at most `budget` tokens.

    First fit over at most `OPEN_BINS` open bins: a row goes into the oldest open bin with room for it. If there is
    none, a new bin is opened, and the fullest one is closed if there are too many. Bins are ordered by their first
    rows, rows within a bin as in `order`.

    Raises:
        ValueError: a row is longer than the budget.
    """
    bins: list[list[int]] = []
    room: dict[int, int] = {}  # open bins, oldest first -> free tokens
    for row in map(int, order):
        length = lengths[row]
        if length > budget:
            raise ValueError(f"row {row} has {length} tokens, more than the budget of {budget}")
        target = next((bin for bin, free in room.items() if free >= length), None)
        if target is None:
            if len(room) == OPEN_BINS:
                del room[min(room, key=lambda bin: (room[bin], bin))]
            target = len(bins)
            bins.append([])
            room[target] = budget
        bins[target].append(row)
        room[target] -= length
        if room[target] == 0:
            del room[target]
    return bins


def batches(
    lengths: Sequence[int], order: Sequence[int] | np.ndarray, *, batch_size: int, max_length: int, packing: bool
) -> list[list[int]]:
    """The rows of each batch, as indices into `lengths`.

    With packing, a batch is a bin of `batch_size * max_length` tokens; without, `batch_size` consecutive rows of the
    order, fewer in the last batch.
    """
    if packing:
        return pack(lengths, order, batch_size * max_length)
    rows = [int(row) for row in order]
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
