"""What a student is compared with: a teacher's distribution over its top K tokens and everything else as one bucket."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgpu_lora.data import UNTRAINED
from wgpu_lora.distill.support import Support
from wgpu_lora.ops.support import LOWEST, NO_ID

# The least probability of the bucket. It is 1 minus the sum of the others, which float32 and float16 leave uncertain by
# about this much, and divergences other than forward KL are infinite where it is 0.
LEAST_TAIL = 1e-6


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """What a teacher says about n targets.

    ids: u32 [n, K + 1], its K most likely tokens, descending, and the target if it is not one of them, else NO_ID.
    logprobs: f32 [n, K + 1], of those K tokens and of all others together; LOWEST if there are no others.
    places: u32 [n], the target's column in `ids`.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    places: np.ndarray


def teacher_rows(support: Support, targets: np.ndarray, vocab_size: int, temperature: float = 1.0) -> TeacherRows:
    """The distribution softmax(logits / temperature) of a teacher.

    At temperature 1 the log-sum-exp of all logits is known. At others, that of the tokens outside of the top K is
    estimated from the random ones, of which there must be some. Where K is the vocabulary, both are exact.

    Args:
        targets: ids [n] of the tokens that the data have.
    """
    n, kept = len(support.lse), support.kept
    logits = support.logits.astype(np.float64) / temperature
    top, others = logits[:, :kept], logits[:, kept:] + support.correction[:, None].astype(np.float64)
    logprobs = np.full((n, kept + 1), LOWEST)
    if kept == vocab_size:
        logprobs[:, :kept] = top - np.logaddexp.reduce(top, 1, keepdims=True)
    else:
        if temperature == 1:
            lse = support.lse.astype(np.float64)
        else:
            assert others.shape[1], "at this temperature the rest is only known from random tokens"
            lse = np.logaddexp.reduce(np.concatenate([top, others], 1), 1)
        likely = top - lse[:, None]
        total = np.exp(likely).sum(1)
        tail = np.maximum(1 - total, LEAST_TAIL)
        logprobs[:, :kept] = likely - np.log(total / (1 - tail))[:, None]
        logprobs[:, kept] = np.log(tail)
    ids = np.full((n, kept + 1), NO_ID, np.uint32)
    ids[:, :kept] = support.ids[:, :kept]
    hits = ids[:, :kept] == np.asarray(targets).reshape(n, 1)
    places = np.where(hits.any(1), hits.argmax(1), kept).astype(np.uint32)
    ids[:, kept] = np.where(places == kept, targets, NO_ID)
    return TeacherRows(ids, logprobs.astype(np.float32), places)


def targets_of(labels: np.ndarray | None) -> np.ndarray:
    """The ids of a row's trained tokens, given unshifted labels."""
    assert labels is not None
    targets: np.ndarray = labels[1:][labels[1:] != UNTRAINED]
    return targets
