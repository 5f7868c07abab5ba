"""Hold rows out for validation: a function of the seed and of what the rows contain, not of their order."""

from __future__ import annotations

import math

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.names.text import count_noun

OPTION = "validation_split"

_BLOCK = 1 << 20  # rows that are looked up together


def row_key(digest: bytes) -> int:
    """The key of rows that stay together, from a digest of what they have in common."""
    return int.from_bytes(digest[:8], "little")


def check_split(amount: float) -> None:
    """Raise UserError unless an amount is a share between 0 and 1, or a whole number of rows."""
    if not (math.isfinite(amount) and (0 < amount < 1 or (amount >= 1 and amount == int(amount)))):
        raise UserError(
            f"{setting(OPTION, amount)} is neither a share of the rows, such as 0.1, nor a number of rows, such as 50."
        )


def validation_mask(keys: np.ndarray, amount: float, seed: int) -> np.ndarray:
    """Which rows are held out, bool [rows].

    Rows with equal keys are a group, which is held out as a whole or not at all. Groups are taken in a random order
    that depends on the seed and their keys only; a group that is larger than what is left is passed over.

    Args:
        keys: u64 [rows]. amount: a share of the rows, or a number of them.

    Raises:
        UserError: the rows cannot be split that way.
    """
    check_split(amount)
    rows = len(keys)
    target = int(rows * amount + 0.5) if amount < 1 else int(amount)
    if target >= rows:
        raise UserError(
            f"{setting(OPTION, amount)} leaves no rows to train on, of {count_noun(rows, 'row')}: lower it."
        )
    target = max(1, target)
    ranks = _mixed(keys, seed)  # one to one, so groups stay apart
    sorted_ranks = np.sort(ranks)
    if rows == 1 or not np.any(sorted_ranks[1:] == sorted_ranks[:-1]):
        return ranks <= sorted_ranks[target - 1]
    starts = np.flatnonzero(np.concatenate(([True], sorted_ranks[1:] != sorted_ranks[:-1]))).astype(np.uint32)
    sizes = np.diff(starts, append=np.uint32(rows))
    if len(sizes) == 1:
        raise UserError(
            f"All {rows:,} rows belong together, so {flag(OPTION)} cannot split them: give held-out rows of their own."
        )
    groups = _choose_groups(sizes, target)
    if not len(groups):  # every group is too large
        groups = np.array([np.argmin(sizes)])
    held_out = sorted_ranks[starts[groups]]
    del sorted_ranks, starts, sizes
    mask = np.empty(rows, bool)
    for at in range(0, rows, _BLOCK):
        block = ranks[at : at + _BLOCK]
        mask[at : at + _BLOCK] = held_out[np.minimum(np.searchsorted(held_out, block), len(held_out) - 1)] == block
    return mask


def _choose_groups(sizes: np.ndarray, target: int) -> np.ndarray:
    """The positions of the groups that are taken, in order, without exceeding `target` rows."""
    result: list[np.ndarray] = []
    at, remaining = 0, target
    while remaining and len(fitting := np.flatnonzero(sizes[at:] <= remaining)):
        at += int(fitting[0])
        sums = np.cumsum(sizes[at : at + remaining], dtype=np.int64)  # each has a row
        count = int(np.searchsorted(sums, remaining, side="right"))
        result.append(np.arange(at, at + count))
        remaining -= int(sums[count - 1])
        at += count
    return np.concatenate(result) if result else np.array([], np.int64)


def _mixed(keys: np.ndarray, seed: int) -> np.ndarray:
    """A bijection of 64-bit numbers for each seed: the finaliser of SplitMix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        start = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
        x = keys.astype(np.uint64) ^ start
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x ^= x >> np.uint64(shift)
            x *= np.uint64(factor)
        x ^= x >> np.uint64(31)
    return x
