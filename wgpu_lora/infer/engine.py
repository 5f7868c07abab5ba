"""Continuous batching: every step gives each running sequence a token, and computes pieces of new prompts beside them.

What a sequence gets does not depend on what runs beside it, to the bit: kernels of a kind sum in the same order for any
number of rows, pieces of prompts begin at multiples of BLOCK tokens (of PIECE, if layers have a state), and only
prompts' keys and values are used again. Blocks of the cache are taken as an answer grows. If none is left, the newest
sequence gives its up and is computed again as before: its prompt in pieces, its answer by one token a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from wgpu_lora.errors import NoRoomError, UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.formats.peft_adapter import Matrices
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.gpu.device_errors import BindingTooLarge, with_option_advice
from wgpu_lora.gpu.kernel import cdiv
from wgpu_lora.gpu.memory_leases import claim
from wgpu_lora.gpu.program import Arena, Program, allocate, missing_bytes, release
from wgpu_lora.gpu.tensor import Storage, Tensor
from wgpu_lora.gpu.tiling_check import check_tilings
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.infer.adapter_slots import AdapterSlots, FixedSlots
from wgpu_lora.infer.block_pool import BlockPool, Key, block_keys
from wgpu_lora.infer.engine_programs import BUCKETS, EDITS, TOP, EngineLimits, Head, Programs, Step, StepRows
from wgpu_lora.infer.request import EngineStats, Request, StepOutput, TokenLogprobs
from wgpu_lora.models.adapter_set import AdapterSet
from wgpu_lora.models.batch_inputs import write
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.ops.attention.attention import BLOCK
from wgpu_lora.ops.loss.sampling import NO_TOKEN, PARAMS

MAX_MODEL_LEN = 4096  # tokens of a sequence by default
CACHE_DTYPES = ("f32", "f16")
PIECE = 64  # tokens: the chunks of delta nets, whose states pass from chunk to chunk
TIMES = 5  # of steps without prompts, whose median counts
REFRESH = 8  # steps with prompts, after which one has none, so that this time is known while there are always prompts


@dataclass(eq=False)
class _Sequence:
    """A request that waits or runs.

    prompt: the tokens to compute before the next one is chosen: the request's, or all so far if they are computed anew.
    keys: of the prompt's blocks that the cache may have or keep. index, slot, blocks: while it runs, its index among
    the sequences, its adapter's slot or -1, and its blocks of the cache. computed: tokens whose keys and values these
    have. begun: whether it has run before.
    """

    request: Request
    prompt: np.ndarray
    keys: list[Key]
    index: int = -1
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    begun: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        """Whether its next step computes a token of the answer."""
        return self.computed >= self.prompt.size

    @property
    def at_newest(self) -> bool:
        """Whether that is the newest one, after which the next is chosen."""
        return self.computed + 1 == self.request.length


class Engine:
    """Runs requests over one base model, each with an adapter of its own or none. Use it from one thread.

    Args:
        model: its weights are loaded if needed.
        max_model_len: tokens of a sequence including the prompt; by default 4096, or the model's limit.
        max_num_seqs: sequences that run together.
        max_num_batched_tokens: tokens of prompts in a step, which decide how long it takes at most; of `buckets`, the
            largest that is not more.
        max_slowdown: of a step by prompts while answers run, as a multiple of its time without: decides the tokens of
            prompts in it by measured times; None for no limit.
        cache_tokens: of all sequences; by default as many as they can need, or as many as there is memory for.
        cache_dtype: f32, or f16 for half the memory and keys and values that are rounded to 11 bits.
        max_loras, max_lora_rank, dora, max_cpu_loras: see `AdapterSlots`.
        adapters: on the device, instead of adapters that are loaded by name.
        buckets: rows of the prefill programs, ascending.
        temperature: of log-probabilities.
        plan_only: only record the programs; whoever allocates `storages` then calls `place`.

    Raises:
        UserError: a size is not possible, or the device has no room.
    """

    @with_option_advice(otherwise="use shorter prompts and answers, fewer at a time, or a smaller model")
    def __init__(
        self,
        model: LoadedModel,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = BUCKETS[-1],
        max_slowdown: float | None = None,
        cache_tokens: int | None = None,
        cache_dtype: str = "f32",
        max_loras: int = 0,
        max_lora_rank: int = 16,
        dora: bool = False,
        max_cpu_loras: int | None = None,
        adapters: AdapterSet | None = None,
        buckets: Sequence[int] = BUCKETS,
        temperature: float = 1.0,
        plan_only: bool = False,
        events: Events = SILENT,
    ):
        limit = model.config.max_position_embeddings
        length = min(MAX_MODEL_LEN, limit) if max_model_len is None else max_model_len
        if not 0 < length <= limit:
            raise UserError(
                f"A capacity of {length:,} tokens is not possible: {model.name} supports 1 to {limit:,} tokens."
            )
        if cache_dtype not in CACHE_DTYPES:
            raise UserError(f"A cache of {cache_dtype} is not possible: use {' or '.join(CACHE_DTYPES)}.")
        if max_num_seqs < 1:
            raise UserError(f"{max_num_seqs} sequences are not possible: use at least one.")
        if cache_tokens is not None and cache_tokens < length:
            raise UserError(
                f"A cache of {cache_tokens:,} tokens is too small for a sequence of {length:,}: use at least that many."
            )
        self.model, self.device, self.max_model_len, self.max_num_seqs = model, model.device, length, max_num_seqs
        self.slots: AdapterSlots | FixedSlots = FixedSlots(adapters)
        if adapters is None and max_loras:
            self.slots = AdapterSlots(model, max_loras, max_lora_rank, dora, max_cpu_loras)
        fitting = tuple(size for size in buckets if size <= max(max_num_batched_tokens, buckets[0]))
        self._most_rows, self._max_slowdown = fitting[-1], max_slowdown
        self._room = fitting[0]  # tokens of prompts in a step while answers run
        self._decode_times: dict[int, deque[float]] = {}  # seconds of steps without prompts, by rows of their program
        self._decode_rows, self._prompt_steps = 0, 0  # of the newest program that decoded; steps with prompts since one
        self._wait, self._waited_prompt_tokens = (
            0.0,
            0,
        )  # seconds, and tokens of prompts, since the answers' newest tokens
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._is_scoring = False  # whether the last step computed a prompt with log-probabilities
        self.step_tokens = 0, 0  # of prompts, and decoded, in the last step
        self.step_seconds: float | None = None  # None if a program was compiled in it
        self.arena, self._claim, self._built = Arena(self.device), ExitStack(), set[Program]()
        self._owned: set[Storage] = set()
        max_blocks = max_num_seqs * cdiv(length, BLOCK)
        blocks = max_blocks if cache_tokens is None else cdiv(cache_tokens, BLOCK)
        if plan_only:
            self._record(EngineLimits(max_num_seqs, length, blocks, fitting, cache_dtype, temperature))
            return
        while True:
            try:
                self._open(EngineLimits(max_num_seqs, length, blocks, fitting, cache_dtype, temperature), events)
                return
            except (NoRoomError, BindingTooLarge):
                self.close()
                blocks //= 2
                if cache_tokens is not None or blocks * BLOCK < length:
                    raise
            except BaseException:
                self.close()
                raise

    def _record(self, limits: EngineLimits) -> None:
        self.programs = programs = Programs(self.device, self.model.decoder, self.slots.adapters, limits)
        self.state, self._pool = programs.state, BlockPool(limits.blocks)
        self._free_indices = list(range(limits.sequences - 1, -1, -1))

    def all_programs(self) -> list[Program]:
        return [*self.programs.all(), *self.slots.programs]

    def storages(self) -> set[Storage]:
        """All storage that is not in an arena, weights included."""
        own = (program.persistent_storages() for program in self.slots.programs)
        adapters = self.slots.adapters.storages() if self.slots.adapters else set[Storage]()
        return self.programs.storages().union(adapters, *own)

    def place(self, arena: Arena) -> None:
        """Run in an arena that has room for each of `all_programs`. The base and `storages` are on the device."""
        self.arena = arena
        self.state.tables.upload(self.device)
        self._run(self.programs.shared)
        self.slots.open()
        for program in self.slots.programs:
            self._build(program)

    def forget(self) -> None:
        """Forget the beginnings of earlier prompts, since weights have changed. Nothing runs."""
        assert not self.busy, "requests run"
        self._pool = BlockPool(self.programs.limits.blocks)

    def _open(self, limits: EngineLimits, events: Events) -> None:
        model = self.model
        self._record(limits)
        self._owned = {s for s in self.storages() - model.decoder.storages() if s.buffer is None}
        sizes = Arena.sizes_for([program.plan() for program in self.all_programs()])
        self.plan: dict[str, int] = {"base": sum(s.nbytes for s in model.decoder.storages()), "activations": sum(sizes)}
        for storage in self._owned:
            self.plan[storage.group] = self.plan.get(storage.group, 0) + storage.nbytes
        need = model.bytes_to_load() + missing_bytes(self._owned) + sum(sizes)
        self._claim.enter_context(claim(self.device, need, "generating"))
        self._claim.enter_context(verdicts_of(self.device).reported_to(events))
        model.load_weights(events)
        allocate(self.device, self._owned)
        self.place(Arena(self.device, sizes))

    def compile(self) -> None:
        """Compile all programs, so that no step has to. An answer is computed, since some drivers compile only then."""
        for program in self.programs.all():
            self._build(program)
        self.add(Request([0], max_new_tokens=2))
        while self.busy:
            self.step()
        self._prompt_tokens = self._generated_tokens = 0
        self._decode_times.clear()

    def close(self) -> None:
        """Free what was allocated here; the model, and adapters that were given, stay."""
        self.arena.free()
        release(self.device, self._owned)
        self._owned, self._built = set(), set()
        self._claim.close()

    # -- requests --------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, adapter: AdapterConfig, matrices: Matrices) -> None:
        """Make an adapter known by a name. Raises UserError as `AdapterSlots.load`."""
        if not isinstance(self.slots, AdapterSlots):
            raise UserError(f"The adapter '{name}' has no slot on the device: start with room for adapters.")
        self.slots.load(name, adapter, matrices)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; its requests finish first. Raises UserError if it is unknown."""
        if isinstance(self.slots, AdapterSlots):
            self.slots.unload(name)

    def add(self, request: Request, name: str = "The prompt") -> None:
        """Queue a request. name: of its prompt, in errors.

        Raises:
            UserError: the prompt is empty, too long, or outside of the model's vocabulary, or the adapter is unknown.
        """
        prompt, vocab = request.prompt, self.model.config.vocab_size
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise UserError(f"{request.max_new_tokens} new tokens are not possible: use at least one.")
        if not prompt:
            raise UserError(f"{name} has no tokens: give a text that is not empty.")
        if len(prompt) > self.max_model_len:
            raise UserError(
                f"{name} has {len(prompt):,} tokens, but a sequence may have {self.max_model_len:,} here: shorten it."
            )
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise UserError(
                f"{name} has a token outside the model's vocabulary of {vocab:,}: use the model's own tokenizer."
            )
        if any(not 0 <= token < vocab for token in request.sampling.logit_bias):
            raise UserError(f"A logit bias is of a token outside the model's vocabulary of {vocab:,}: leave it out.")
        if request.logprobs is not None and not 0 <= request.logprobs <= TOP:
            raise UserError(f"Log-probabilities of {request.logprobs} tokens are not possible: use 0 to {TOP}.")
        if request.adapter is not None:
            self.slots.add(request.adapter)
        self._waiting.append(_Sequence(request, np.array(prompt, np.int64), self._block_keys(request)))

    def _block_keys(self, request: Request) -> list[Key]:
        switch, size = self.model.config.switch(), len(request.prompt)
        # Keys and values of a sequence that grows beyond the switch are computed twice, in its own blocks.
        grows = switch is not None and size <= switch < size + (request.max_new_tokens or self.max_model_len)
        if grows or not self.state.cache.shares_prefixes:
            return []
        adapter = None if request.adapter is None else self.slots.key(request.adapter)
        return block_keys((adapter, switch is not None and size > switch), request.prompt)

    def abort(self, request: Request) -> None:
        """End a request; it gets no more outputs."""
        for sequence in (*self._waiting, *self._running):
            if sequence.request is request:
                self._end(sequence)
                break
        request.finish_reason = request.finish_reason or "abort"

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._waiting or self._running)

    def stats(self) -> EngineStats:
        usage = 1 - self._pool.available / self._pool.count
        counts = self._prompt_tokens, self._cached_tokens, self._generated_tokens
        return EngineStats(len(self._running), len(self._waiting), usage, *counts)

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Compute pieces of prompts, and the next token of each sequence whose prompt is computed.

        Raises:
            DeviceLost: the device is gone.
        """
        begin, built = time.perf_counter(), len(self._built)
        outputs = self._step()
        seconds = time.perf_counter() - begin
        self.step_seconds = seconds if len(self._built) == built else None
        self._adjust_room(seconds)
        return outputs

    def _step(self) -> list[StepOutput]:
        self._grow()
        self._admit()
        self.step_tokens = 0, 0
        to_score = next((s for s in self._running if s.request.prompt_logprobs and not s.decodes), None)
        decoding = [s for s in self._running if s.decodes]
        room = self._prompt_room(len(decoding))
        pieces = self._pieces(room)
        others_wait = self._is_scoring and (decoding or pieces)  # a prompt is scored in every other step at most
        self._is_scoring = to_score is not None and room > 0 and not others_wait
        if to_score and self._is_scoring:
            self._compute_with_logprobs(to_score, room)
            return self._choose([to_score]) if to_score.computed == to_score.request.length else []
        chosen = [s for s in self._in_order(decoding) if s.at_newest]
        ready = [s for s, end in pieces if end == s.request.length]
        self.step_tokens = sum(end - s.computed for s, end in pieces), len(decoding)
        if pieces:
            self._prefill(pieces, ready, len(chosen))
        if decoding:
            self._decode(decoding)
        return self._choose([*chosen, *ready]) if chosen or ready else []

    def _prompt_room(self, decoding: int) -> int:
        """The tokens of prompts in a step beside this many answers."""
        rows = self._bucket(decoding) if decoding else 0
        if rows != self._decode_rows:
            self._decode_rows, self._room = rows, min(self.programs.prefill)
        if not decoding or self._max_slowdown is None:
            return self._most_rows
        return self._room if rows in self._decode_times and self._prompt_steps < REFRESH else 0

    def _adjust_room(self, seconds: float) -> None:
        """Choose `_room` from how long answers have waited for their newest tokens: it grows while there is time."""
        prompts, decoded = self.step_tokens
        self._wait, self._waited_prompt_tokens = self._wait + seconds, self._waited_prompt_tokens + prompts
        if self._decode_rows and not decoded:
            return  # a prompt was scored, and the answers still wait
        waited, prompt_tokens, self._wait, self._waited_prompt_tokens = self._wait, self._waited_prompt_tokens, 0.0, 0
        if not self._decode_rows or self.step_seconds is None:
            return
        times = self._decode_times.get(self._decode_rows)
        self._prompt_steps = self._prompt_steps + 1 if prompt_tokens else 0
        if not prompt_tokens:
            self._decode_times.setdefault(self._decode_rows, deque(maxlen=TIMES)).append(seconds)
        elif times and self._max_slowdown is not None:
            usual = float(np.median(times))
            sizes = [size for size in self.programs.prefill if size <= self._most_rows]
            larger = min((size for size in sizes if size > self._room), default=self._room)
            limit = self._max_slowdown * usual
            if waited > limit:
                self._room = max((size for size in sizes if size < self._room), default=self._room)
            elif 2 * prompt_tokens > self._room and usual + larger / self._room * (waited - usual) <= limit:
                self._room = larger

    def _grow(self) -> None:
        """Take the blocks that answers need next, the oldest first. If none is left, the newest sequence begins again
        later, with all that it has so far, before those that wait."""
        for sequence in list(self._running):
            size = max(sequence.prompt.size, sequence.computed + 1)  # all is computed anew beyond the model's switch
            while sequence.index >= 0 and len(sequence.blocks) * BLOCK < size:
                if self._pool.available:
                    sequence.blocks += self._pool.take(1)
                    continue
                newest = self._running[-1]
                self._stop(newest)
                newest.computed, newest.prompt_logprobs = 0, []
                self._waiting.appendleft(newest)

    def _admit(self) -> None:
        """Begin requests in the order that they came, while there is room for what they have so far and a block more of
        each that runs. One whose prompt begins as another's that is being computed waits for that."""
        if not (self._waiting and self._free_indices):
            return
        computing = {key for s in self._running for key in s.keys[s.computed // BLOCK :]}
        for sequence in list(self._waiting):
            if not self._free_indices:
                return
            request, size = sequence.request, sequence.prompt.size
            usable = [] if request.prompt_logprobs else sequence.keys[: (size - 1) // BLOCK]
            blocks = self._pool.cached(usable)
            if computing.intersection(usable[len(blocks) : len(blocks) + 1]):
                self._pool.release(blocks)
                continue
            count = cdiv(request.length, BLOCK) - len(blocks)
            fits = count + len(self._running) <= self._pool.available
            slot = -1 if request.adapter is None else self.slots.acquire(request.adapter) if fits else None
            if not fits or slot is None:
                self._pool.release(blocks)
                return
            self._waiting.remove(sequence)
            self._running.append(sequence)
            computing.update(sequence.keys[len(blocks) :])
            sequence.index, sequence.slot = self._free_indices.pop(), slot
            sequence.blocks = [*blocks, *self._pool.take(count)]
            sequence.computed = BLOCK * len(blocks)
            if not sequence.begun:
                request.cached_tokens, sequence.begun = sequence.computed, True
                self._prompt_tokens += size
                self._cached_tokens += request.cached_tokens

    def _stop(self, sequence: _Sequence) -> None:
        """Give up what a running sequence has."""
        self._running.remove(sequence)
        self._free_indices.append(sequence.index)
        self._pool.release(sequence.blocks)
        sequence.index, sequence.blocks = -1, []
        if sequence.request.adapter is not None:
            self.slots.release(sequence.request.adapter)

    def _end(self, sequence: _Sequence) -> None:
        if sequence.index >= 0:
            self._stop(sequence)
        else:
            self._waiting.remove(sequence)
        if sequence.request.adapter is not None:
            self.slots.remove(sequence.request.adapter)

    def _pieces(self, room: int) -> list[tuple[_Sequence, int]]:
        """Sequences with the ends of the pieces of their prompts in the next prefill step, of `room` tokens."""
        pieces: list[tuple[_Sequence, int]] = []
        by_block = self.state.cache.shares_prefixes
        unit = min(BLOCK if by_block else PIECE, self._most_rows)
        for sequence in self._running:
            if pieces and not by_block:
                break  # chunks of a delta net are rows of the step, so that each sequence must begin with the first
            if sequence.decodes or sequence.request.prompt_logprobs:
                continue
            size = min(sequence.prompt.size - sequence.computed, max(room, unit) if pieces == [] and room else room)
            if sequence.computed + size < sequence.prompt.size:
                size -= size % unit
            if size <= 0:
                break
            pieces.append((sequence, sequence.computed + size))
            room -= size
        return pieces

    @staticmethod
    def _in_order(sequences: Sequence[_Sequence]) -> list[_Sequence]:
        """By slot, as rows must be, with the base alone last."""
        return sorted(sequences, key=lambda s: (s.slot < 0, s.slot))

    def _prefill(self, pieces: list[tuple[_Sequence, int]], ready: list[_Sequence], first: int) -> None:
        """Compute pieces of prompts; hidden states of the last tokens become rows from `first` on."""
        ends = dict(pieces)
        order = self._in_order([sequence for sequence, _ in pieces])
        starts = [sequence.computed for sequence in order]
        sizes = np.array([ends[s] - start for s, start in zip(order, starts, strict=True)])
        last = dict(zip(order, np.cumsum(sizes) - 1, strict=True))
        rows = StepRows(
            ids=np.concatenate([s.prompt[start : ends[s]] for s, start in zip(order, starts, strict=True)]),
            positions=np.concatenate([np.arange(start, ends[s]) for s, start in zip(order, starts, strict=True)]),
            sequences=np.repeat([s.index for s in order], sizes),
            slots=np.repeat([s.slot for s in order], sizes),
            blocks=[s.blocks[: cdiv(ends[s], BLOCK)] for s in order],
            lengths=np.repeat([s.prompt.size for s in order], sizes),
            logits_indices=np.array([last[s] for s in ready], np.int64),
            first=first,
        )
        step = self._prefill_step(rows.ids.size)
        self._run_step(step, rows)
        for sequence, end in ends.items():
            for index in range(sequence.computed // BLOCK, min(end // BLOCK, len(sequence.keys))):
                self._pool.keep(sequence.blocks[index], sequence.keys[index])
            sequence.computed = end

    def _prefill_step(self, rows: int) -> Step:
        sizes = self.programs.prefill
        return sizes[next((size for size in sizes if size >= rows), max(sizes))]

    def _decode(self, decoding: list[_Sequence]) -> None:
        """Compute the next token of each sequence; hidden states of the newest ones become the first rows, in order."""
        order = self._in_order(decoding)
        positions = np.array([s.computed for s in order])
        rows = StepRows(
            ids=np.array([s.request.token_ids[s.computed - len(s.request.prompt)] for s in order]),
            positions=positions,
            sequences=np.array([s.index for s in order]),
            slots=np.array([s.slot for s in order]),
            blocks=[s.blocks[: cdiv(s.computed + 1, BLOCK)] for s in order],
            lengths=positions + 1,
            logits_indices=np.flatnonzero([s.at_newest for s in order]),
        )
        self._run_step(self.programs.decode[self._bucket(len(order))], rows)
        for sequence in order:
            sequence.computed += 1

    def _bucket(self, rows: int) -> int:
        return next(size for size in self.programs.limits.rows if size >= rows)

    def _run_step(self, step: Step, rows: StepRows) -> None:
        step.upload(rows)
        self._run(step.program)

    def _run(self, program: Program) -> None:
        self._build(program)
        program.run()

    def _build(self, program: Program) -> None:
        if program not in self._built:
            check_tilings(self.device, [program])
            program.build(self.arena)
            self._built.add(program)

    def read_logits(self) -> np.ndarray:
        """f32 [max_num_seqs, vocab] of the last step, a row for each of its outputs."""
        chunks = [self.device.read(t.storage.buffer).view(np.float32).reshape(t.shape) for t in self.state.logits]
        return np.concatenate(chunks, axis=1)

    # -- the next tokens -------------------------------------------------------------------------------------------

    def _choose(self, sequences: list[_Sequence]) -> list[StepOutput]:
        """The next tokens, from the hidden states of the first rows."""
        head = self.programs.heads[self._bucket(len(sequences))]
        tokens = self._sample(head, sequences)
        flags = [s.request.logprobs is not None for s in sequences]
        logprobs = self._logprobs(head, tokens) if any(flags) else []
        outputs = []
        for i, (sequence, token) in enumerate(zip(sequences, tokens.tolist(), strict=True)):
            request = sequence.request
            if token == NO_TOKEN:
                owner = f"of the adapter '{request.adapter}'" if request.adapter is not None else "of the model"
                request.error = (
                    "The model's logits are not finite, or a grammar allows no token: the weights "
                    f"{owner} may be damaged."
                )
                request.finish_reason = "error"
                self._end(sequence)
                outputs.append(StepOutput(request, None))
                continue
            of_token = None
            if request.logprobs is not None:
                of_token = replace(logprobs[i], top=logprobs[i].top[: request.logprobs])
            outputs.append(self._output(sequence, token, of_token))
        return outputs

    def _sample(self, head: Head, sequences: list[_Sequence]) -> np.ndarray:
        state, rows = self.state, len(sequences)
        params = np.zeros(rows, PARAMS)
        masked, edits = np.zeros(rows, np.uint32), []
        for i, sequence in enumerate(sequences):
            request = sequence.request
            params[i] = request.sampling.row(request.length)
            if request.grammar:
                words = np.zeros(state.masks.shape[1], np.uint32)
                request.grammar.fill_mask(words)
                self.device.write(state.masks.storage.buffer, words, words.nbytes * i)
                masked[i] = 1
            if request.sampling.edits_logits:
                tokens, factors, differences = request.sampling.edits(request.prompt, request.token_ids)
                index = (i * state.vocab + tokens).astype(np.uint32)
                edits.append(np.stack([index, factors.view(np.uint32), differences.view(np.uint32), 0 * index], axis=1))
        write(self.device, state.masked, masked)
        self.device.write(state.params.storage.buffer, params.view(np.uint32))
        self._run(head.logits if edits else head.choose)
        if edits:
            whole = np.concatenate(edits)
            for start in range(0, len(whole), EDITS):
                part = np.full((EDITS, 4), NO_TOKEN, np.uint32)
                part[: len(whole[start : start + EDITS])] = whole[start : start + EDITS]
                self.device.write(state.edits.storage.buffer, part)
                self._run(self.programs.edits)
            self._run(head.sample)
        return self.device.read(state.ids.storage.buffer, 4 * rows).view(np.uint32).astype(np.int64)

    def _logprobs(self, head: Head, targets: np.ndarray) -> list[TokenLogprobs]:
        """Of target tokens, by the logits of the first rows, which are lost."""
        state, rows, device = self.state, len(targets), self.device
        write(device, state.targets, np.where(targets == NO_TOKEN, 0, targets))
        write(device, state.count, np.array([rows]))
        self._run(head.logprobs)

        def values(tensor: Tensor, dtype: str) -> np.ndarray:
            width = tensor.shape[1]
            return device.read(tensor.storage.buffer, 4 * rows * width).view(dtype).reshape(rows, width)

        top, total, target_logits, spread = values(state.softmax, "f4").astype(np.float64).T
        rate = 1 / self.programs.limits.temperature
        sizes, entropies = rate * top + np.log(total), np.log(total) - spread / total
        best, ids = values(state.top[head.last], "f4"), values(state.top_ids[head.last], "u4")
        result = []
        for i in range(rows):
            order = np.argsort(-best[i], kind="stable")
            pairs = [(int(ids[i, j]), float(rate * best[i, j] - sizes[i])) for j in order]
            logprob = float(rate * target_logits[i] - sizes[i])
            result.append(TokenLogprobs(int(targets[i]), logprob, pairs, float(entropies[i])))
        return result

    def _compute_with_logprobs(self, sequence: _Sequence, room: int) -> None:
        """Compute the next piece of a prompt with log-probabilities, with a row of the head for each token."""
        request, prompt, start = sequence.request, sequence.prompt, sequence.computed
        size = min(self.max_num_seqs, room) if self.state.cache.shares_prefixes else self.max_num_seqs
        rows = np.arange(start, min(start + size, prompt.size - 1))
        for first in range(0, rows.size, self._most_rows):
            self._compute_rows(sequence, rows[first : first + self._most_rows], first)
        if rows.size:
            head = self.programs.heads[self._bucket(rows.size)]
            write(self.device, self.state.masked, np.zeros(rows.size))
            self._run(head.logits)
            sequence.prompt_logprobs += [
                replace(item, top=item.top[: request.logprobs or 0]) for item in self._logprobs(head, prompt[rows + 1])
            ]
        sequence.computed += rows.size
        self._waited_prompt_tokens += rows.size
        if sequence.computed == prompt.size - 1:
            self._compute_rows(sequence, np.array([prompt.size - 1]), 0)
            sequence.computed = prompt.size

    def _compute_rows(self, sequence: _Sequence, positions: np.ndarray, first: int) -> None:
        """Compute tokens of a prompt, whose hidden states become rows from `first` on."""
        size = positions.size
        rows = StepRows(
            ids=sequence.prompt[positions],
            positions=positions,
            sequences=np.full(size, sequence.index),
            slots=np.full(size, sequence.slot),
            blocks=[sequence.blocks[: cdiv(int(positions[-1]) + 1, BLOCK)]],
            lengths=np.full(size, sequence.prompt.size),
            logits_indices=np.arange(size),
            first=first,
        )
        self._run_step(self._prefill_step(size), rows)

    def _output(self, sequence: _Sequence, token: int, logprobs: TokenLogprobs | None) -> StepOutput:
        request, of_prompt = sequence.request, None
        if request.prompt_logprobs and not request.token_ids:
            of_prompt = sequence.prompt_logprobs
        self._generated_tokens += 1
        if token in request.stop_ids:
            request.finish_reason = "stop"
            self._end(sequence)
            return StepOutput(request, None, logprobs, of_prompt, token)
        request.token_ids.append(token)
        if request.grammar:
            request.grammar.accept(token)
        if len(request.token_ids) == request.max_new_tokens:
            request.finish_reason = "length"
        elif request.length > self.max_model_len:  # the cache has no row left for this token
            request.finish_reason = "capacity"
        switch = self.model.config.switch()
        if request.finish_reason:
            self._end(sequence)
        elif switch is not None and request.length == switch + 1:
            sequence.prompt, sequence.computed = np.array([*request.prompt, *request.token_ids]), 0
        return StepOutput(request, token, logprobs, of_prompt)
