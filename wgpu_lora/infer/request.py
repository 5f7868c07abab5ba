"""What is asked of an engine, one sequence each, and what it gives for every token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from wgpu_lora.infer.sampling import Sampler

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
