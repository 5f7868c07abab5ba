"""What is asked of an engine, one sequence each and how its tokens are sampled, and what it gives for every token."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from wgpu_lora.errors import UserError

MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments only (Philox; raw words, which are the same in any NumPy)."""
    key = np.array([seed & MASK, position & MASK], np.uint64)
    return float(int(np.random.Philox(key=key).random_raw()) >> 40) * 2.0**-24  # exact in f32


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen (`ops.loss.sampling` does it).

    Filters as in transformers, in the same order: penalties and biases, temperature, top-k, top-p, min-p.

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


GREEDY = Sampler()
FinishReason = Literal["stop", "length", "capacity", "abort", "error"]


class Grammar(Protocol):
    """The tokens that a grammar allows next. It belongs to one request."""

    def fill_mask(self, words: np.ndarray) -> None:
        """Set bit i % 32 of words[i // 32] for each token i that may come next: u32 [vocab / 32], zeros at first."""

    def accept(self, token: int) -> None:
        """Advance by a token that was allowed."""


@dataclass(eq=False)
class Request:
    """A prompt to continue.

    Args:
        prompt: token ids, at least one.
        adapter: the name of a loaded adapter, None for the base model alone.
        max_new_tokens: None for as many as the engine's `max_model_len` allows.
        stop_ids: tokens that end the answer; they are not part of it.
        logprobs: None, or of how many of the most likely tokens log-probabilities are returned, beside the token's own.
        prompt_logprobs: whether they are returned for the prompt's tokens, too.
        grammar: restricts the tokens; a token of `stop_ids` counts as the end of it.
    """

    prompt: list[int]
    adapter: str | None = None
    sampling: Sampler = GREEDY
    max_new_tokens: int | None = None
    stop_ids: Collection[int] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: Grammar | None = None
    token_ids: list[int] = field(default_factory=list)  # of the answer so far
    finish_reason: FinishReason | None = None  # None while it runs
    error: str | None = None  # a sentence, if that is the reason
    cached_tokens: int = 0  # of the prompt, whose keys and values were in the prefix cache

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.prompt) + len(self.token_ids)


@dataclass(frozen=True)
class TokenLogprobs:
    """Of a token, by the model's distribution before penalties and grammar, at the engine's temperature.

    top: (token, log-probability) of the most likely ones, in this order. entropy: of the distribution.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    entropy: float = 0.0


@dataclass(frozen=True)
class StepOutput:
    """What a step gave a request.

    token: None if it ended without one: at a stop token, or by an error.
    logprobs: of the token, if the request wants them. prompt_logprobs: of prompt[1:], once, with the first output.
    end_token: the token of `stop_ids` that ended it, whose `logprobs` these then are.
    The request's `finish_reason` is set by the time its last output is returned.
    """

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    end_token: int | None = None


@dataclass(frozen=True)
class EngineStats:
    """running, waiting: requests. cache_usage: the share of the cache's blocks that requests use.

    prompt_tokens, cached_tokens, generated_tokens: since the start; cached: of prompts, found in the prefix cache.
    """

    running: int
    waiting: int
    cache_usage: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
