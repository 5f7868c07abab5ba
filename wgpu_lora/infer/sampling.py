"""Choice of the next token: greedy, or sampled with temperature, top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wgpu_lora.errors import UserError

MASK = 2**64 - 1
LARGEST = 1e300  # limit of a penalised logit, so that differences are finite


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments only (Philox; raw words, which are the same in any NumPy)."""
    key = np.array([seed & MASK, position & MASK], np.uint64)
    return float(int(np.random.Philox(key=key).random_raw()) >> 11) * 2.0**-53


@dataclass(frozen=True)
class Sampler:
    """Filters as in transformers, in the same order: repetition penalty, temperature, top-k, top-p, min-p.

    temperature: divisor of the logits; 0 takes the most likely token, the one with the lowest id if several are equal.
    top_k: keep the k most likely tokens (and any as likely as the last of them); 0 keeps all.
    top_p: keep the most likely tokens until their probabilities sum to p; 1 keeps all.
    seed: of the draws, which are a function of the seed and the token's position, independent of the rest of the batch.
    min_p: keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
    repetition_penalty: logits of tokens that occur in the prompt or the answer are divided by this if positive and
        multiplied by it if negative; 1 changes nothing. It also applies to greedy choice.

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
            raise UserError(f"A temperature of {self.temperature} is not valid: use 0 (greedy) or a positive number.")
        if self.top_k < 0:
            raise UserError(f"A top-k of {self.top_k} is not valid: use 0 (all tokens) or a positive number.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"A top-p of {self.top_p} is not valid: use a number above 0 and at most 1.")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"A min-p of {self.min_p} is not valid: use a number from 0 (all tokens) to 1.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(
                f"A repetition penalty of {self.repetition_penalty} is not valid: use a number above 0, 1 for none."
            )

    def __call__(self, logits: np.ndarray, position: int, before: Sequence[int] = ()) -> int:
        """The id of the token at `position` of its sequence, given logits f32 [vocab].

        Args:
            before: tokens of the sequence so far, including the prompt, for the repetition penalty.

        Raises:
            UserError: the logits are not finite.
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
        """Logits in float64, with those of tokens that have occurred penalised."""
        ids = np.unique(np.asarray(before, np.int64))
        scores = logits.astype(np.float64)
        with np.errstate(over="ignore"):
            changed = np.where(
                scores[ids] < 0, scores[ids] * self.repetition_penalty, scores[ids] / self.repetition_penalty
            )
        scores[ids] = np.clip(changed, -LARGEST, LARGEST)
        return scores

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids, probabilities in float64) of the tokens that may be sampled, most likely first."""
        # The largest logit is shifted to 0 first, so that a tiny temperature cannot overflow to NaN.
        scores = (logits.astype(np.float64) - logits.max()) / self.temperature
        ids = np.arange(scores.size)
        if 0 < self.top_k < scores.size:
            ids = np.flatnonzero(scores >= np.partition(scores, -self.top_k)[-self.top_k])
        ids = ids[np.argsort(-scores[ids], kind="stable")]
        weights = np.exp(scores[ids])
        probabilities = weights / weights.sum()
        if self.top_p < 1:
            before = np.cumsum(probabilities) - probabilities
            count = max(1, int(np.count_nonzero(before < self.top_p)))
            ids, probabilities = ids[:count], probabilities[:count] / probabilities[:count].sum()
        if self.min_p > 0:
            count = max(1, int(np.count_nonzero(probabilities >= self.min_p * probabilities[0])))
            ids, probabilities = ids[:count], probabilities[:count] / probabilities[:count].sum()
        return ids, probabilities
