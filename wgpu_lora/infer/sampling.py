"""The parameters of sampling: how the next token is chosen from a model's logits (`ops.loss.sampling` does it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from wgpu_lora.errors import UserError

MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments only (Philox; raw words, which are the same in any NumPy)."""
    key = np.array([seed & MASK, position & MASK], np.uint64)
    return float(int(np.random.Philox(key=key).random_raw()) >> 40) * 2.0**-24  # exact in f32


@dataclass(frozen=True)
class Sampler:
    """Filters as in transformers, in the same order: penalties and biases, temperature, top-k, top-p, min-p.

    temperature: divisor of the logits; 0 takes the most likely token, the one with the lowest id if several are equal.
    top_k: keep the k most likely tokens (and any as likely as the last of them); 0 keeps all.
    top_p: keep the most likely tokens until their probabilities sum to p, and any as likely as the last; 1 keeps all.
    seed: of the draws, which are a function of the seed and the token's position, independent of the rest of the batch.
    min_p: keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
    repetition_penalty: logits of tokens that occur in the prompt or the answer are divided by this if positive and
        multiplied by it if negative; 1 changes nothing. Like the following, it also applies to greedy choice.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens that occur in the answer, once, and times
        their number.
    logit_bias: added to logits, by token.

    Raises:
        UserError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

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
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not abs(value) < float("inf"):
                raise UserError(f"A {name} penalty of {value} is not valid: use a finite number, 0 for none.")
        for token, bias in self.logit_bias.items():
            if not abs(bias) < float("inf"):
                raise UserError(f"A logit bias of {bias} for token {token} is not valid: use a finite number.")

    def row(self, position: int) -> tuple[float, float, float, float, int, tuple[int, int, int]]:
        """A row of `ops.loss.sampling.PARAMS` for the token at `position` of its sequence."""
        if self.temperature == 0:
            return 0.0, 1.0, 0.0, 0.0, 0, (0, 0, 0)
        top_k, temperature = min(self.top_k, 2**32 - 1), max(self.temperature, 1e-30)  # as f32 has
        return temperature, self.top_p, self.min_p, uniform(self.seed, position), top_k, (0, 0, 0)

    @property
    def edits_logits(self) -> bool:
        """Whether there are penalties or biases."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias)

    def edits(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens int64, factors, differences) of `ops.loss.sampling.edit_scores` after these tokens."""
        differences: dict[int, float] = {token: -bias for token, bias in self.logit_bias.items()}
        if self.presence_penalty or self.frequency_penalty:
            for token, count in zip(*np.unique(np.array(answer, np.int64), return_counts=True), strict=True):
                penalty = self.presence_penalty + self.frequency_penalty * int(count)
                differences[int(token)] = differences.get(int(token), 0.0) + penalty
        repeated = {*prompt, *answer} if self.repetition_penalty != 1 else set()
        tokens = np.array(sorted(repeated | differences.keys()), np.int64)
        factors = [self.repetition_penalty if token in repeated else 1.0 for token in tokens.tolist()]
        values = [differences.get(token, 0.0) for token in tokens.tolist()]
        return tokens, np.array(factors, np.float32), np.clip(np.array(values), -1e30, 1e30).astype(np.float32)
