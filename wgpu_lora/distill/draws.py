"""Random tokens for each position, without replacement: a function of the seed, the row and the position only."""

from __future__ import annotations

import numpy as np

_ROUNDS = 6


def drawn(seed: int, row: int, positions: np.ndarray, count: int, vocab_size: int) -> np.ndarray:
    """The first `count` tokens of a random order of the vocabulary for each position, u32 [n, count].

    The order is a Feistel network over the smallest even number of bits that hold an id, in which ids outside of the
    vocabulary are walked over (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").

    Args:
        positions: of the predicted tokens in their row, int [n].
    """
    assert count <= vocab_size
    half = max(1, -(-int(vocab_size - 1).bit_length() // 2))
    keys = _round_keys(seed, row, positions)
    found = np.broadcast_to(np.arange(count, dtype=np.uint32), (len(positions), count)).copy()
    out = np.ones(found.shape, bool)
    while out.any():
        found[out] = _shuffled(found[out], keys[:, np.nonzero(out)[0]], half)
        out = found >= vocab_size
    return found


def _shuffled(x: np.ndarray, keys: np.ndarray, half: int) -> np.ndarray:
    mask, shift = np.uint32((1 << half) - 1), np.uint32(half)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    joined: np.ndarray = left << shift | right
    return joined


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of MurmurHash3, a bijection of 32-bit numbers."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    last: np.ndarray = x ^ x >> np.uint32(16)
    return last


def _round_keys(seed: int, row: int, positions: np.ndarray) -> np.ndarray:
    """u32 [rounds, n]: the upper halves of SplitMix64's output (Steele et al. 2014) for (seed, row, position)."""
    start = np.random.SeedSequence([seed, row]).generate_state(1, np.uint64)[0]
    with np.errstate(over="ignore"):
        x = start + positions.astype(np.uint64) * np.uint64(_ROUNDS)
        x = x + np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None]
        x = x * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ x >> np.uint64(shift)) * np.uint64(factor)
    mixed: np.ndarray = x ^ x >> np.uint64(31)
    return (mixed >> np.uint64(32)).astype(np.uint32)
