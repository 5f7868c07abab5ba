"""Sequences that are being generated: what has come of each, and whether what is asked for is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.infer.sampling import Sampler

StopReason = Literal["stop", "length", "capacity", "interrupt"]


@dataclass
class Generation:
    """What became of one prompt.

    token_ids: without the prompt and without the stop token.
    stop_reason: "stop" (a stop token, or a stop string), "length" (max_new_tokens), "capacity" (the cache is full) or
        "interrupt" (nobody asked for the rest); None while it goes on.
    prefill_speed, decode_speed: tokens a second of all sequences that ran together; 0 where there was nothing to time.
        The first prompt of a length is slower, since drivers compile on first use; decoding leaves its first step out.
    """

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    prefill_speed: float = 0.0
    decode_speed: float = 0.0


@dataclass
class Run:
    """The sequences that run together, ordered by slot; `numbers` are the caller's."""

    numbers: list[int]
    prompts: list[np.ndarray]
    slots: list[int | None]
    results: list[Generation]

    def length(self, index: int) -> int:
        return self.prompts[index].size + len(self.results[index].token_ids)

    def ids(self, index: int) -> np.ndarray:
        """The whole sequence so far."""
        return np.concatenate([self.prompts[index], np.array(self.results[index].token_ids, np.int64)])

    def extend(
        self,
        index: int,
        logits: np.ndarray,
        sampler: Sampler,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        capacity: int,
    ) -> int | None:
        """Adds a token to a sequence and returns it, None where it is a stop token; the last one ends the sequence."""
        result = self.results[index]
        before = self.ids(index).tolist() if sampler.repetition_penalty != 1 else ()
        token = sampler(logits, self.length(index), before)
        if token in stop_ids:
            result.stop_reason = "stop"
            return None
        result.token_ids.append(token)
        if len(result.token_ids) == max_new_tokens:
            result.stop_reason = "length"
        elif self.length(index) > capacity:  # this token has no row in the cache any more
            result.stop_reason = "capacity"
        return token


def check_requests(
    prompts: Sequence[Sequence[int]],
    slots: Sequence[int | None],
    max_new_tokens: int,
    vocab: int,
    available: int,
    capacity: int,
) -> None:
    """Raises UserError where a prompt cannot be continued.

    Args:
        slots: of each prompt, one of `available` adapters or None.
        vocab, capacity: token ids that there are, and tokens that a sequence may have.
    """
    assert len(prompts) == len(slots), f"{len(prompts)} prompts, but {len(slots)} slots"
    if max_new_tokens < 1:
        raise UserError(f"{max_new_tokens} new tokens cannot be generated: ask for at least one.")
    for number, (prompt, slot) in enumerate(zip(prompts, slots, strict=True), 1):
        if not len(prompt):
            raise UserError(f"Prompt {number} has no tokens: give some text to go on from.")
        if len(prompt) > capacity:
            raise UserError(
                f"Prompt {number} has {len(prompt):,} tokens, but the cache holds {capacity:,}: "
                "shorten it, or raise the capacity."
            )
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise UserError(
                f"Prompt {number} has a token outside of the model's vocabulary of {vocab:,}: "
                "use the model's own tokenizer."
            )
        if slot is not None and not 0 <= slot < available:
            raise UserError(
                f"Prompt {number} asks for adapter {slot}, but {available} are loaded, counted from 0: "
                "choose one of them, or None for the base alone."
            )
