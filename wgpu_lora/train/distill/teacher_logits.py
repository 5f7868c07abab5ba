"""A teacher's logits at the trained tokens of a row, for a few tokens of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgpu_lora.data import UNTRAINED
from wgpu_lora.ops.loss.sparse_logits import LOWEST, NO_ID


@dataclass(frozen=True, eq=False)
class TopKLogits:
    """The logits of a teacher that n trained positions of a row keep, of S = K + R tokens each.

    ids: u32 [n, S]; the first K are those with the largest logits, descending, ties by id; the others were drawn
        without replacement from the rest.
    logits: f32 [n, S], raw. lse: f32 [n], the log-sum-exp of all raw logits.
    top_k: K.
    correction: f32 [n], ln((V - K) / R), which, added to the R random logits, makes the sum of their exponentials an
        unbiased estimate of that of all V - K tokens outside the top K; 0 if R is 0.
    """

    ids: np.ndarray
    logits: np.ndarray
    lse: np.ndarray
    top_k: int
    correction: np.ndarray

    def part(self, start: int, stop: int) -> TopKLogits:
        """The positions [start, stop)."""
        ids, logits, lse, correction = (
            array[start:stop] for array in (self.ids, self.logits, self.lse, self.correction)
        )
        return TopKLogits(ids, logits, lse, self.top_k, correction)


def tail_correction(vocab_size: int, top_k: int, random: int) -> float:
    """ln((V - K) / R), which is added to the logits of R tokens that represent V - K; 0 without such tokens."""
    return float(np.log((vocab_size - top_k) / random)) if random else 0.0


# The least probability of the bucket. It is 1 minus the sum of the others, which float32 and float16 leave uncertain by
# about this much, and divergences other than forward KL are infinite where it is 0.
MIN_TAIL = 1e-6


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """A teacher's logits at n targets.

    ids: u32 [n, K + 1], its K most likely tokens, descending, and the target if it is not one of them, else NO_ID.
    logprobs: f32 [n, K + 1], of those K tokens and of all others together; LOWEST if there are no others.
    target_columns: u32 [n], the target's column in `ids`.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    target_columns: np.ndarray


def teacher_rows(support: TopKLogits, targets: np.ndarray, vocab_size: int, temperature: float = 1.0) -> TeacherRows:
    """The distribution softmax(logits / temperature) of a teacher.

    At temperature 1 the log-sum-exp of all logits is known. At others, that of the tokens outside of the top K is
    estimated from the random ones, of which there must be some. Where K is the vocabulary, both are exact.

    Args:
        targets: ids [n] of the tokens that the data have.
    """
    n, top_k = len(support.lse), support.top_k
    logits = support.logits.astype(np.float64) / temperature
    top, estimates = logits[:, :top_k], logits[:, top_k:] + support.correction[:, None].astype(np.float64)
    logprobs = np.full((n, top_k + 1), LOWEST)
    if top_k == vocab_size:
        logprobs[:, :top_k] = top - np.logaddexp.reduce(top, 1, keepdims=True)
    else:
        if temperature == 1:
            lse = support.lse.astype(np.float64)
        else:
            assert estimates.shape[1], "at this temperature the rest is only known from random tokens"
            lse = np.logaddexp.reduce(np.concatenate([top, estimates], 1), 1)
        likely = top - lse[:, None]
        total = np.exp(likely).sum(1)
        tail = np.maximum(1 - total, MIN_TAIL)
        logprobs[:, :top_k] = likely - np.log(total / (1 - tail))[:, None]
        logprobs[:, top_k] = np.log(tail)
    ids = np.full((n, top_k + 1), NO_ID, np.uint32)
    ids[:, :top_k] = support.ids[:, :top_k]
    hits = ids[:, :top_k] == np.asarray(targets).reshape(n, 1)
    columns = np.where(hits.any(1), hits.argmax(1), top_k).astype(np.uint32)
    ids[:, top_k] = np.where(columns == top_k, np.asarray(targets, np.uint32), np.uint32(NO_ID))
    return TeacherRows(ids, logprobs.astype(np.float32), columns)


def target_ids(labels: np.ndarray | None) -> np.ndarray:
    """The ids of a row's trained tokens, given unshifted labels."""
    assert labels is not None
    targets: np.ndarray = labels[1:][labels[1:] != UNTRAINED]
    return targets


_ROUNDS = 6


def random_tokens(seed: int, row: int, positions: np.ndarray, count: int, vocab_size: int) -> np.ndarray:
    """The first `count` tokens of a random order of the vocabulary for each position, u32 [n, count].

    The order is a Feistel network over the smallest even number of bits that hold an id, in which ids outside of the
    vocabulary are walked over (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").

    Args:
        positions: of the predicted tokens in their row, int [n].
    """
    assert count <= vocab_size
    half = max(1, -(-int(vocab_size - 1).bit_length() // 2))
    keys = _round_keys(seed, row, positions)
    result = np.broadcast_to(np.arange(count, dtype=np.uint32), (len(positions), count)).copy()
    out = np.ones(result.shape, bool)
    while out.any():
        result[out] = _shuffled(result[out], keys[:, np.nonzero(out)[0]], half)
        out = result >= vocab_size
    return result


def _shuffled(x: np.ndarray, keys: np.ndarray, half: int) -> np.ndarray:
    mask, shift = np.uint32((1 << half) - 1), np.uint32(half)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    result: np.ndarray = left << shift | right
    return result


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
