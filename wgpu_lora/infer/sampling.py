"""Which token comes next: greedy, or drawn after temperature, top-k, top-p and min-p have had their say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wgpu_lora.errors import UserError

MASK = 2**64 - 1
LARGEST = 1e300  # of a penalised logit: differences of such are finite


def uniform(seed: int, position: int) -> float:
    """A draw from [0, 1) that depends on nothing but its arguments (Philox; raw words, which NumPy never changes)."""
    key = np.array([seed & MASK, position & MASK], np.uint64)
    return float(int(np.random.Philox(key=key).random_raw()) >> 11) * 2.0**-53


@dataclass(frozen=True)
class Sampler:
    """Filters in transformers' order and by its definitions: repetition penalty, temperature, top-k, top-p, min-p.

    temperature: what logits are divided by; 0 takes the likeliest token, of equal ones that with the lowest id.
    top_k: only the k likeliest tokens (and any as likely as the last of them); 0 keeps all.
    top_p: only the likeliest tokens up to the one with which their sum reaches p; 1 keeps all.
    seed: of the draws. A draw is a function of the seed and the token's position, whatever else is in the batch.
    min_p: only tokens at least this share as likely as the likeliest; 0 keeps all.
    repetition_penalty: logits of tokens that have occurred, in the prompt too, are divided by this where they are
        positive and multiplied by it where they are negative; 1 changes nothing. It holds for greedy choice as well.

    Raises:
        UserError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"A temperature of {self.temperature} cannot be used: give 0 (greedy) or a positive number."
            )
        if self.top_k < 0:
            raise UserError(f"A top-k of {self.top_k} cannot be used: give 0 (all tokens) or a positive number.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"A top-p of {self.top_p} cannot be used: give a number above 0 and at most 1.")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"A min-p of {self.min_p} cannot be used: give a number from 0 (all tokens) to 1.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(
                f"A repetition penalty of {self.repetition_penalty} cannot be used: give a number above 0, 1 for none."
            )

    def __call__(self, logits: np.ndarray, position: int, before: Sequence[int] = ()) -> int:
        """The id of the token at `position` of its sequence, given logits f32 [vocab].

        Args:
            before: the tokens of the sequence so far, prompt included, for the repetition penalty.

        Raises:
            UserError: the logits are not numbers.
        """
        if not np.isfinite(logits.max()):
            raise UserError("The model's logits are not finite: its weights, or those of the adapter, are damaged.")
        if self.repetition_penalty != 1 and len(before):
            logits = self.penalised(logits, before)
        if self.temperature == 0:
            return int(logits.argmax())
        ids, probabilities = self.distribution(logits)
        reached = np.cumsum(probabilities)
        index = np.searchsorted(reached, uniform(self.seed, position) * reached[-1], side="right")
        return int(ids[min(int(index), ids.size - 1)])

    def penalised(self, logits: np.ndarray, before: Sequence[int]) -> np.ndarray:
        """Logits in float64 in which tokens that have occurred are less likely (more, under a penalty below 1)."""
        ids = np.unique(np.asarray(before, np.int64))
        scores = logits.astype(np.float64)
        with np.errstate(over="ignore"):
            changed = np.where(
                scores[ids] < 0, scores[ids] * self.repetition_penalty, scores[ids] / self.repetition_penalty
            )
        scores[ids] = np.clip(changed, -LARGEST, LARGEST)
        return scores

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids, probabilities in float64) of the tokens that may be drawn, likeliest first."""
        # The likeliest token is at 0 before the division, so that a tiny temperature cannot overflow to NaN.
        scores = (logits.astype(np.float64) - logits.max()) / self.temperature
        ids = np.arange(scores.size)
        if 0 < self.top_k < scores.size:
            ids = np.flatnonzero(scores >= np.partition(scores, -self.top_k)[-self.top_k])
        ids = ids[np.argsort(-scores[ids], kind="stable")]
        weights = np.exp(scores[ids])
        probabilities = weights / weights.sum()
        if self.top_p < 1:
            before = np.cumsum(probabilities) - probabilities
            kept = max(1, int(np.count_nonzero(before < self.top_p)))
            ids, probabilities = ids[:kept], probabilities[:kept] / probabilities[:kept].sum()
        if self.min_p > 0:
            kept = max(1, int(np.count_nonzero(probabilities >= self.min_p * probabilities[0])))
            ids, probabilities = ids[:kept], probabilities[:kept] / probabilities[:kept].sum()
        return ids, probabilities
