"""Sequences during generation: their results, and checks of requests."""

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
    """The result for one prompt.

    token_ids: without the prompt and without the stop token.
    stop_reason: "stop" (a stop token, or a stop string), "length" (max_new_tokens), "capacity" (the cache is full) or
        "interrupt" (the caller stopped); None while running.
    prefill_speed, decode_speed: tokens per second of all sequences that ran together; 0 if nothing was timed. The first
        prompt of a length is slower, since drivers compile on first use; decoding leaves out its first step.
    """

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    prefill_speed: float = 0.0
    decode_speed: float = 0.0


@dataclass
class Run:
    """Sequences that run together, ordered by slot; `numbers` are their positions in the caller's list."""

    numbers: list[int]
    prompts: list[np.ndarray]
    slots: list[int | None]
    results: list[Generation]
    samplers: list[Sampler]

    def length(self, index: int) -> int:
        return self.prompts[index].size + len(self.results[index].token_ids)

    def ids(self, index: int) -> np.ndarray:
        """Token ids of the sequence so far."""
        return np.concatenate([self.prompts[index], np.array(self.results[index].token_ids, np.int64)])

    def switching(self, live: Sequence[int], switch: int | None) -> list[int]:
        """Those whose newest token changes how all others are computed (`ModelConfig.switch`)."""
        return [i for i in live if switch is not None and self.length(i) == switch + 1]

    def extend(
        self,
        index: int,
        logits: np.ndarray,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        capacity: int,
    ) -> int | None:
        """Add a token to a sequence; returns it, or None for a stop token. The last token ends the sequence."""
        result, sampler = self.results[index], self.samplers[index]
        before = self.ids(index).tolist() if sampler.repetition_penalty != 1 else ()
        token = sampler(logits, self.length(index), before)
        if token in stop_ids:
            result.stop_reason = "stop"
            return None
        result.token_ids.append(token)
        if len(result.token_ids) == max_new_tokens:
            result.stop_reason = "length"
        elif self.length(index) > capacity:  # the cache has no row left for this token
            result.stop_reason = "capacity"
        return token


def laid_out(prompts: Sequence[np.ndarray], starts: Sequence[int]) -> tuple[np.ndarray, ...]:
    """The tokens of all prompts from `starts` on, one prompt after the other: int64 [n] each, but for the last.

    Returns (ids, positions, sequences, lengths of their sequences, the place of each prompt's last token or -1).
    """
    sizes = np.array([prompt.size for prompt in prompts])
    counts = sizes - np.asarray(starts)
    ids = np.concatenate([prompt[start:] for prompt, start in zip(prompts, starts, strict=True)])
    sequences, ends = np.repeat(np.arange(len(prompts)), counts), np.cumsum(counts) - 1
    positions = np.arange(ids.size) - (ends - counts + 1)[sequences] + np.asarray(starts)[sequences]
    return ids, positions, sequences, sizes[sequences], np.where(counts > 0, ends, -1)


def known_tokens(held: np.ndarray, prompt: np.ndarray, rewinds: bool, switch: int | None) -> int:
    """Tokens of a prompt, without its last one, whose state in the cache, of the tokens `held`, is of use.

    rewinds: see `Cache`. switch: see `ModelConfig`.
    """
    short = switch is not None and held.size < switch and prompt.size <= switch
    if switch is not None and not short and min(held.size, prompt.size) <= switch:
        return 0
    size = min(held.size, prompt.size - 1)
    differing = np.flatnonzero(held[:size] != prompt[:size])
    known = int(differing[0]) if differing.size else size
    return known if rewinds or known == held.size else 0


def check_requests(
    prompts: Sequence[Sequence[int]],
    slots: Sequence[int | None],
    max_new_tokens: int,
    vocab: int,
    available: int,
    capacity: int,
) -> None:
    """Raise UserError if a prompt cannot be continued.

    Args:
        slots: of each prompt, the number of an adapter below `available`, or None.
        vocab, capacity: number of token ids, and maximum tokens of a sequence.
    """
    assert len(prompts) == len(slots), f"{len(prompts)} prompts, but {len(slots)} slots"
    if max_new_tokens < 1:
        raise UserError(f"{max_new_tokens} new tokens are not possible: use at least one.")
    for number, (prompt, slot) in enumerate(zip(prompts, slots, strict=True), 1):
        if not len(prompt):
            raise UserError(f"Prompt {number} has no tokens: give a text that is not empty.")
        if len(prompt) > capacity:
            raise UserError(
                f"Prompt {number} has {len(prompt):,} tokens, but a sequence may have {capacity:,} here: shorten it."
            )
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise UserError(
                f"Prompt {number} has a token outside the model's vocabulary of {vocab:,}: "
                "use the model's own tokenizer."
            )
        if slot is not None and not 0 <= slot < available:
            raise UserError(
                f"Prompt {number} asks for adapter {slot}, but {available} are loaded, counted from 0: "
                "choose one of them, or None for the base alone."
            )
