"""Generation with a KV cache: a batch of sequences, each with an adapter of its own or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.program import Arena, Program, allocate, missing_bytes, release
from wgpu_lora.gpu.tensor import Storage
from wgpu_lora.infer.sampling import Sampler
from wgpu_lora.infer.step import Programs, Step
from wgpu_lora.models.inputs import NOWHERE
from wgpu_lora.models.load import Progress as Loading
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.models.lora import AdapterSet
from wgpu_lora.share import claim

CAPACITY = 2048  # tokens of a sequence where nothing else is said
BUCKETS = (16, 64, 256, 1024)  # rows of the prefill programs; each is compiled only when a prompt needs it

StopReason = Literal["stop", "length", "capacity"]
OnToken = Callable[[int, int], None]


@dataclass
class Generation:
    """What became of one prompt.

    token_ids: without the prompt and without the stop token.
    stop_reason: "stop" (a stop token), "length" (max_new_tokens) or "capacity" (the cache is full).
    prefill_speed, decode_speed: tokens a second of all sequences that ran together; 0 where there was nothing to time.
        The first prompt of a length is slower, since drivers compile on first use; decoding leaves its first step out.
    """

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    stop_reason: StopReason = "length"
    prefill_speed: float = 0.0
    decode_speed: float = 0.0


class Generator:
    """Programs and caches for generating. Only the memory plan is made here; shaders compile on first use.

    Args:
        model: its weights are loaded if they are not yet.
        adapters: a slot for each adapter that may be asked for.
        capacity: tokens of a sequence, prompt included; by default 2048, or as many as the model is made for.
        batch: sequences that run at a time.
        buckets: rows of the prefill programs, ascending.

    Raises:
        UserError: the model is not made for so many tokens, or the device has no room for their keys and values.
    """

    def __init__(
        self,
        model: LoadedModel,
        adapters: AdapterSet | None = None,
        capacity: int | None = None,
        batch: int = 1,
        buckets: Sequence[int] = BUCKETS,
        progress: Loading = lambda name: None,
    ):
        limit = model.config.max_position_embeddings
        capacity = min(CAPACITY, limit) if capacity is None else capacity
        if not 0 < capacity <= limit:
            raise UserError(
                f"A capacity of {capacity:,} tokens cannot be used: {model.name} is made for 1 to {limit:,} tokens."
            )
        self.model, self.adapters, self.device = model, adapters, model.device
        programs = Programs.record(self.device, model.decoder, adapters, batch, capacity, buckets)
        self.state, self._head = programs.state, programs.head
        self._prefill, self._decode = programs.prefill, programs.decode
        base = model.decoder.storages()
        self._owned: set[Storage] = {s for s in programs.storages() - base if s.buffer is None}
        sizes = Arena.sizes_for([program.plan() for program in programs.all()])
        self._arena, self._claim = Arena(self.device), ExitStack()
        try:
            need = model.bytes_to_load() + missing_bytes(self._owned) + sum(sizes)
            self._claim.enter_context(claim(self.device, need, "generating"))
            model.load_weights(progress)
            allocate(self.device, self._owned)
            self._arena = Arena(self.device, sizes)
        except BaseException:
            self.close()
            raise
        self.state.upload(self.device, model.config)
        self._built: set[Program] = set()
        self._build(programs.kept)
        programs.kept.run()

    @property
    def capacity(self) -> int:
        return self.state.capacity

    @property
    def batch(self) -> int:
        return self.state.batch

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int | None] | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 50,
        seed: int = 0,
        stop_ids: Collection[int] = (),
        on_token: OnToken = lambda sequence, token: None,
    ) -> list[Generation]:
        """Continues every prompt; more prompts than `batch` run in turns.

        Args:
            prompts: token ids, at least one each.
            slots: which adapter each prompt uses, None for the base alone; left out, no prompt uses any.
            temperature, top_p, top_k, seed: see Sampler. Draws depend on seed and position alone, so that equal
                prompts give equal answers.
            stop_ids: tokens that end a sequence; they are not part of it.
            on_token: called with (prompt's number, token id) as soon as a token is known.

        Raises:
            UserError: a prompt is empty, too long, or not of this model's vocabulary; there is no such slot; a sampling
                parameter is out of range.
        """
        chosen = [None] * len(prompts) if slots is None else list(slots)
        sampler = Sampler(temperature, top_k, top_p, seed)
        self._check(prompts, chosen, max_new_tokens)
        results = [Generation(len(prompt)) for prompt in prompts]
        # By slot, None last: rows of a slot must lie side by side.
        order = sorted(range(len(prompts)), key=lambda i: (chosen[i] is None, chosen[i] or 0))
        for start in range(0, len(order), self.batch):
            together = order[start : start + self.batch]
            ids = [np.asarray(prompts[i], np.int64) for i in together]
            run = _Run(together, ids, [chosen[i] for i in together], [results[i] for i in together])
            self._generate(run, sampler, max_new_tokens, frozenset(stop_ids), on_token)
        return results

    def next_logits(self, prompts: Sequence[Sequence[int]], slots: Sequence[int | None]) -> np.ndarray:
        """Logits f32 [prompts, vocab] of what follows each of at most `batch` prompts, which are ordered by slot."""
        assert len(prompts) <= self.batch
        self._check(prompts, slots, 1)
        self._run_prompts([np.asarray(prompt, np.int64) for prompt in prompts], slots)
        return self.state.read_logits(self.device)[: len(prompts)]

    def close(self) -> None:
        """Frees the caches and all else that was allocated here; the model and the adapters stay."""
        self._arena.free()
        release(self.device, self._owned)
        self._owned = set()
        self._claim.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- one batch -------------------------------------------------------------------------------------------------

    def _generate(
        self, run: _Run, sampler: Sampler, max_new_tokens: int, stop_ids: frozenset[int], on_token: OnToken
    ) -> None:
        seconds = self._run_prompts(run.prompts, run.slots)
        tokens = sum(prompt.size for prompt in run.prompts)
        for result in run.results:
            result.prefill_speed = tokens / seconds
        live = list(range(len(run.prompts)))
        decoded, decode_seconds = 0, 0.0
        while True:
            logits = self.state.read_logits(self.device)
            live = [i for i in live if self._extend(run, i, logits[i], sampler, max_new_tokens, stop_ids, on_token)]
            if not live:
                break
            fresh = self._build(self._decode.program)
            begin = time.perf_counter()
            newest = np.array([run.results[i].token_ids[-1] for i in live])
            positions = np.array([run.length(i) - 1 for i in live])
            picked = np.full(self.batch, NOWHERE, np.int64)
            picked[live] = np.arange(len(live))
            self._decode.upload(newest, positions, np.array(live), run.slots, picked)
            self._decode.program.run()
            self._head.run()
            self.device.wait()
            if not fresh:  # a program's first run compiles inside the driver
                decoded, decode_seconds = decoded + len(live), decode_seconds + time.perf_counter() - begin
        for result in run.results:
            result.decode_speed = decoded / decode_seconds if decoded else 0.0

    def _extend(
        self,
        run: _Run,
        index: int,
        logits: np.ndarray,
        sampler: Sampler,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        on_token: OnToken,
    ) -> bool:
        """Adds a token to a sequence; False where that was its last."""
        result = run.results[index]
        token = sampler(logits, run.length(index))
        if token in stop_ids:
            result.stop_reason = "stop"
            return False
        result.token_ids.append(token)
        on_token(run.numbers[index], token)
        if len(result.token_ids) == max_new_tokens:
            return False
        if run.length(index) > self.capacity:  # this token has no row in the cache any more
            result.stop_reason = "capacity"
            return False
        return True

    def _run_prompts(self, prompts: Sequence[np.ndarray], slots: Sequence[int | None]) -> float:
        """Fills the cache and computes the next logits; returns the seconds that took, without compiling."""
        ids = np.concatenate(prompts)
        lengths = np.array([prompt.size for prompt in prompts])
        sequences = np.repeat(np.arange(len(prompts)), lengths)
        ends = np.cumsum(lengths) - 1
        positions = np.arange(ids.size) - (ends - lengths + 1)[sequences]
        pieces: list[tuple[Step, int]] = []
        at = 0
        while at < ids.size:
            step = self._prefill_step(ids.size - at)
            pieces.append((step, at))
            at += step.tokens
        for program in (*(step.program for step, _ in pieces), self._head):
            self._build(program)
        begin = time.perf_counter()
        for step, at in pieces:
            piece = slice(at, at + step.tokens)
            picked = np.full(self.batch, NOWHERE, np.int64)
            here = np.flatnonzero((ends >= at) & (ends < at + step.tokens))
            picked[here] = ends[here] - at
            step.upload(ids[piece], positions[piece], sequences[piece], slots, picked)
            step.program.run()
        self._head.run()
        self.device.wait()
        return time.perf_counter() - begin

    def _prefill_step(self, remaining: int) -> Step:
        """The largest program of which more than half would be used, or else the smallest."""
        fitting = [step for step in self._prefill if step.tokens < 2 * remaining]
        return fitting[-1] if fitting else self._prefill[0]

    def _build(self, program: Program) -> bool:
        """Builds a program before its first run; whether this was it."""
        if program in self._built:
            return False
        program.build(self._arena)
        self._built.add(program)
        return True

    def _check(self, prompts: Sequence[Sequence[int]], slots: Sequence[int | None], max_new_tokens: int) -> None:
        assert len(prompts) == len(slots), f"{len(prompts)} prompts, but {len(slots)} slots"
        vocab, available = self.model.config.vocab_size, len(self.adapters.specs) if self.adapters else 0
        if max_new_tokens < 1:
            raise UserError(f"{max_new_tokens} new tokens cannot be generated: ask for at least one.")
        for number, (prompt, slot) in enumerate(zip(prompts, slots, strict=True), 1):
            if not len(prompt):
                raise UserError(f"Prompt {number} has no tokens: give some text to go on from.")
            if len(prompt) > self.capacity:
                raise UserError(
                    f"Prompt {number} has {len(prompt):,} tokens, but the cache holds {self.capacity:,}: "
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


@dataclass
class _Run:
    """The sequences that run together, ordered by slot; `numbers` are the caller's."""

    numbers: list[int]
    prompts: list[np.ndarray]
    slots: list[int | None]
    results: list[Generation]

    def length(self, index: int) -> int:
        return self.prompts[index].size + len(self.results[index].token_ids)
