"""What a teacher says about the trained tokens of a row: its logits for a few tokens of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Support:
    """The logits of a teacher that n trained positions of a row keep, of S = K + R tokens each.

    ids: u32 [n, S]; the first K are those with the largest logits, descending, ties by id; the others were drawn
        without replacement from the rest.
    logits: f32 [n, S], raw. lse: f32 [n], the log-sum-exp of all raw logits.
    kept: K.
    correction: f32 [n], ln((V - K) / R), which, added to the R random logits, makes the sum of their exponentials an
        unbiased estimate of that of all V - K tokens outside the top K; 0 if R is 0.
    """

    ids: np.ndarray
    logits: np.ndarray
    lse: np.ndarray
    kept: int
    correction: np.ndarray

    def part(self, start: int, stop: int) -> Support:
        """The positions [start, stop)."""
        ids, logits, lse, correction = (
            array[start:stop] for array in (self.ids, self.logits, self.lse, self.correction)
        )
        return Support(ids, logits, lse, self.kept, correction)


def correction_of(vocab_size: int, kept: int, random: int) -> float:
    """ln((V - K) / R): what to add to the logits of R tokens that stand for V - K; 0 if there are none."""
    return float(np.log((vocab_size - kept) / random)) if random else 0.0
