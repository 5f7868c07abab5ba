"""Generation for a batch of sequences, each with an adapter of its own or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.gpu.device_errors import with_option_advice
from wgpu_lora.gpu.program import Arena, Program, allocate, missing_bytes, release
from wgpu_lora.gpu.tensor import Storage
from wgpu_lora.gpu.tiling_check import check_tilings
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.infer.generation_programs import Programs, Step
from wgpu_lora.infer.sampling import Sampler
from wgpu_lora.memory_leases import claim
from wgpu_lora.models.adapter_set import AdapterSet
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.row_inputs import NOWHERE

CAPACITY = 2048  # tokens of a sequence by default
BUCKETS = (16, 64, 256, 1024)  # rows of the prefill programs; each is compiled when a prompt first needs it

OnToken = Callable[[int, int], object]


class Generator:
    """Programs and caches for generation. The constructor only plans memory; shaders compile on first use.

    Args:
        model: its weights are loaded if needed.
        adapters: a slot for each adapter that prompts may use.
        capacity: tokens of a sequence including the prompt; by default 2048, or the model's limit if that is smaller.
        batch: sequences that run together.
        buckets: rows of the prefill programs, ascending.

    Raises:
        UserError: the capacity exceeds the model's limit, or the device has no room for the keys and values.
    """

    @with_option_advice(otherwise="use shorter prompts and answers, fewer at a time, or a smaller model")
    def __init__(
        self,
        model: LoadedModel,
        adapters: AdapterSet | None = None,
        capacity: int | None = None,
        batch: int = 1,
        buckets: Sequence[int] = BUCKETS,
        events: Events = SILENT,
    ):
        limit = model.config.max_position_embeddings
        capacity = min(CAPACITY, limit) if capacity is None else capacity
        if not 0 < capacity <= limit:
            raise UserError(
                f"A capacity of {capacity:,} tokens is not possible: {model.name} supports 1 to {limit:,} tokens."
            )
        self.model, self.adapters, self.device = model, adapters, model.device
        self.programs = programs = Programs.record(self.device, model.decoder, adapters, batch, capacity, buckets)
        self.state, self._head = programs.state, programs.head
        self._prefill, self._decode = programs.prefill, programs.decode
        base = model.decoder.storages()
        self._owned: set[Storage] = {s for s in programs.storages() - base if s.buffer is None}
        sizes = Arena.sizes_for([program.plan() for program in programs.all()])
        self.arena, self._claim = Arena(self.device), ExitStack()
        self._built: set[Program] = set()
        # The adapter and the tokens whose keys and values the cache holds, by sequence.
        self._contents: dict[int, tuple[int | None, np.ndarray]] = {}
        try:
            need = model.bytes_to_load() + missing_bytes(self._owned) + sum(sizes)
            self._claim.enter_context(claim(self.device, need, "generating"))
            self._claim.enter_context(verdicts_of(self.device).reported_to(events))
            model.load_weights(events)
            allocate(self.device, self._owned)
            self.arena = Arena(self.device, sizes)
            self.state.upload(self.device)
            self._build(programs.shared)
            programs.shared.run()
        except BaseException:
            self.close()
            raise

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
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
    ) -> list[Generation]:
        """Continue every prompt; more prompts than `batch` run in batches.

        Args:
            prompts: token ids, at least one each.
            slots: the adapter of each prompt, None for the base model alone; by default, no prompt uses an adapter.
            temperature, top_p, top_k, seed, min_p, repetition_penalty: see Sampler. Draws depend on seed and position
                only, so equal prompts give equal answers.
            stop_ids: tokens that end a sequence; they are not part of it.
            on_token: called with (prompt's number, token id) as soon as a token is sampled.

        Raises:
            UserError: a prompt is empty, too long, or outside the model's vocabulary; a slot does not exist; a sampling
                parameter is out of range.
        """
        sampler = Sampler(temperature, top_k, top_p, seed, min_p, repetition_penalty)
        results = [Generation(len(prompt)) for prompt in prompts]
        for number, token in self.tokens(prompts, slots, results, sampler, max_new_tokens, stop_ids):
            on_token(number, token)
        return results

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int | None] | None,
        results: Sequence[Generation],
        sampler: Sampler | Sequence[Sampler],
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        reuse: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, int]]:
        """Like `generate`, but yields (prompt's number, token id) as soon as a token is sampled.

        Args:
            sampler: of all prompts, or one for each.
            results: one per prompt, filled in here. The caller can end a sequence by setting its stop reason.
            reuse: continue from the cache's previous contents. Keys computed in a batch and one by one differ in
                rounding.
            stopped: called between a prompt's pieces and between tokens; if true, all sequences end.
        """
        chosen = [None] * len(prompts) if slots is None else list(slots)
        available = len(self.adapters.specs) if self.adapters else 0
        vocab = self.model.config.vocab_size
        check_prompts(prompts, chosen, max_new_tokens, vocab, available, self.capacity)
        # Ordered by slot, None last: rows of a slot must be adjacent.
        order = sorted(range(len(prompts)), key=lambda i: (chosen[i] is None, chosen[i] or 0))
        for start in range(0, len(order), self.batch):
            together = order[start : start + self.batch]
            ids = [np.asarray(prompts[i], np.int64) for i in together]
            samplers = [sampler if isinstance(sampler, Sampler) else sampler[i] for i in together]
            run = GenerationBatch(
                together, ids, [chosen[i] for i in together], [results[i] for i in together], samplers
            )
            yield from self._generate(run, max_new_tokens, frozenset(stop_ids), reuse, stopped)

    def next_logits(self, prompts: Sequence[Sequence[int]], slots: Sequence[int | None]) -> np.ndarray:
        """Logits f32 [prompts, vocab] of the token after each of at most `batch` prompts, which are ordered by slot."""
        assert len(prompts) <= self.batch
        available = len(self.adapters.specs) if self.adapters else 0
        check_prompts(prompts, slots, 1, self.model.config.vocab_size, available, self.capacity)
        self._contents.clear()
        self._run_prompts([np.asarray(prompt, np.int64) for prompt in prompts], slots, [0] * len(prompts))
        return self.state.read_logits(self.device)[: len(prompts)]

    def close(self) -> None:
        """Free the caches and everything else allocated here; the model and the adapters stay."""
        self.arena.free()
        release(self.device, self._owned)
        self._owned = set()
        self._claim.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- one batch -------------------------------------------------------------------------------------------------

    def _generate(
        self,
        run: GenerationBatch,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        reuse: bool,
        stopped: Callable[[], bool],
    ) -> Iterator[tuple[int, int]]:
        starts = [self._cached_tokens(i, run) if reuse else 0 for i in range(len(run.prompts))]
        self._contents.clear()  # an interruption leaves the cache in an unknown state
        seconds = self._run_prompts(run.prompts, run.slots, starts, stopped)
        if seconds is None:
            for result in run.results:
                result.stop_reason = "interrupt"
            return
        tokens = sum(prompt.size - start for prompt, start in zip(run.prompts, starts, strict=True))
        for result in run.results:
            result.prefill_speed = tokens / seconds
        live = list(range(len(run.prompts)))
        decoded, decode_seconds = 0, 0.0
        try:
            while True:
                logits = self.state.read_logits(self.device)
                going = []
                for i in live:
                    token = run.extend(i, logits[i], max_new_tokens, stop_ids, self.capacity)
                    if token is not None:
                        yield run.numbers[i], token
                    if run.results[i].stop_reason is None:
                        going.append(i)
                live = going
                if not live or stopped():
                    return
                fresh = self._build(self._decode.program)
                begin = time.perf_counter()
                self._run_decode(run, live)
                if not fresh:  # the driver compiles in a program's first run
                    decoded, decode_seconds = decoded + len(live), decode_seconds + time.perf_counter() - begin
        finally:
            for i, result in enumerate(run.results):
                result.stop_reason = result.stop_reason or "interrupt"
                result.decode_speed = decoded / decode_seconds if decoded else 0.0
                # The newest token enters the cache only when the next one is computed.
                self._contents[i] = run.slots[i], run.ids(i)[: run.length(i) - 1]

    def _cached_tokens(self, index: int, run: GenerationBatch) -> int:
        """Tokens of a prompt that are already in the cache of its sequence, without the last one of the prompt."""
        slot, tokens = self._contents.get(index, (None, np.zeros(0, np.int64)))
        prompt = run.prompts[index]
        if slot != run.slots[index]:
            return 0
        return reusable_prefix(tokens, prompt, self.state.cache.rewinds, self.model.config.switch())

    def _run_decode(self, run: GenerationBatch, live: Sequence[int]) -> None:
        """Compute the logits after the last token of each live sequence."""
        again = run.switching(live, self.model.config.switch())
        if again:  # what the cache holds of these is of no use any more
            whole = [run.ids(i) for i in range(len(run.prompts))]
            self._run_prompts(whole, run.slots, [0 if i in again else ids.size for i, ids in enumerate(whole)])
            live = [i for i in live if i not in again]
        if not live:
            return
        newest = np.array([run.results[i].token_ids[-1] for i in live])
        positions = np.array([run.length(i) - 1 for i in live])
        picked = np.full(self.batch, NOWHERE, np.int64)
        picked[live] = np.arange(len(live))
        self._decode.upload(newest, positions, np.array(live), positions + 1, run.slots, picked)
        self._decode.program.run()
        self._head.run()
        self.device.wait()

    def _run_prompts(
        self,
        prompts: Sequence[np.ndarray],
        slots: Sequence[int | None],
        starts: Sequence[int],
        stopped: Callable[[], bool] = lambda: False,
    ) -> float | None:
        """Fill the cache with the prompts and compute the next logits.

        Returns the seconds taken, without compilation; None if stopped.
        """
        ids, positions, sequences, lengths, newest = flatten_prompts(prompts, starts)
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
            if stopped():
                return None
            piece = slice(at, at + step.tokens)
            picked = np.full(self.batch, NOWHERE, np.int64)
            here = np.flatnonzero((newest >= at) & (newest < at + step.tokens))
            picked[here] = newest[here] - at
            step.upload(ids[piece], positions[piece], sequences[piece], lengths[piece], slots, picked)
            step.program.run()
        self._head.run()
        self.device.wait()
        return time.perf_counter() - begin

    def _prefill_step(self, remaining: int) -> Step:
        """The largest program of which more than half would be used, else the smallest."""
        fitting = [step for step in self._prefill if step.tokens < 2 * remaining]
        return fitting[-1] if fitting else self._prefill[0]

    def _build(self, program: Program) -> bool:
        """Build a program before its first run; returns whether it was built now."""
        if program in self._built:
            return False
        check_tilings(self.device, [program])
        program.build(self.arena)
        self._built.add(program)
        return True


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
class GenerationBatch:
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


def flatten_prompts(prompts: Sequence[np.ndarray], starts: Sequence[int]) -> tuple[np.ndarray, ...]:
    """The tokens of all prompts from `starts` on, one prompt after the other: int64 [n] each, but for the last.

    Returns (ids, positions, sequences, lengths of their sequences, the place of each prompt's last token or -1).
    """
    sizes = np.array([prompt.size for prompt in prompts])
    counts = sizes - np.asarray(starts)
    ids = np.concatenate([prompt[start:] for prompt, start in zip(prompts, starts, strict=True)])
    sequences, ends = np.repeat(np.arange(len(prompts)), counts), np.cumsum(counts) - 1
    positions = np.arange(ids.size) - (ends - counts + 1)[sequences] + np.asarray(starts)[sequences]
    return ids, positions, sequences, sizes[sequences], np.where(counts > 0, ends, -1)


def reusable_prefix(cached: np.ndarray, prompt: np.ndarray, rewinds: bool, switch: int | None) -> int:
    """Tokens of a prompt, without its last one, whose state in the cache, of the tokens `cached`, is of use.

    rewinds: see `Cache`. switch: see `ModelConfig`.
    """
    short = switch is not None and cached.size < switch and prompt.size <= switch
    if switch is not None and not short and min(cached.size, prompt.size) <= switch:
        return 0
    size = min(cached.size, prompt.size - 1)
    differing = np.flatnonzero(cached[:size] != prompt[:size])
    prefix = int(differing[0]) if differing.size else size
    return prefix if rewinds or prefix == cached.size else 0


def check_prompts(
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
