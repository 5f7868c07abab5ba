"""A pass over T rows with a cache: pieces of prompts (prefill), or one token of each sequence (decode)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import BindingTooLarge
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Storage, Tensor, persistent
from wgpu_lora.models.adapter_set import AdapterSet
from wgpu_lora.models.batch_inputs import StepInputs, Tables, padded, write
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.kv_cache import Cache
from wgpu_lora.models.row_inputs import NOWHERE, Rows
from wgpu_lora.ops.embedding import gather_rows, head_logits
from wgpu_lora.ops.recorder import Recorder, SharedTensors
from wgpu_lora.text import count_noun


@dataclass(frozen=True)
class State:
    """Tensors shared by all steps of a batch of sequences. Sequence b owns the cache's rows from b * capacity.

    last f32 [batch, hidden]: newest hidden state of each sequence. logits: f32 [batch, chunk] per chunk of the head.
    """

    batch: int
    capacity: int
    cache: Cache
    tables: Tables
    last: Tensor
    logits: tuple[Tensor, ...]

    @classmethod
    def declare(cls, decoder: Decoder, batch: int, capacity: int) -> State:
        config = decoder.config

        def make(name: str, *shape: int) -> Tensor:
            return persistent(shape, "f32", "workspace", name)

        return cls(
            batch,
            capacity,
            Cache.declare([config.cache(i) for i in range(config.num_hidden_layers)], batch, capacity),
            Tables.declare(config.tables(), capacity),
            make("last hidden", batch, config.hidden_size),
            tuple(make(f"logits {first}", batch, part.rows) for first, part in decoder.head.chunks()),
        )

    def check(self, max_binding: int) -> None:
        """Raise BindingTooLarge if a tensor of a layer's state exceeds a binding."""
        name, nbytes = self.cache.largest()
        if nbytes > max_binding:
            whole = f"{name} of {count_noun(self.batch, 'sequence')} of {self.capacity:,} tokens"
            raise BindingTooLarge(whole, nbytes, max_binding)

    def storages(self) -> set[Storage]:
        outputs = {tensor.storage for tensor in (self.last, *self.logits)}
        return outputs | self.cache.storages() | self.tables.storages()

    def upload(self, device: Device) -> None:
        """Upload constant data."""
        self.tables.upload(device)

    def record_head(self, device: Device, decoder: Decoder) -> Program:
        """A program that computes logits from last."""
        program = Program(device, "head")
        for (_, part), logits in zip(decoder.head.chunks(), self.logits, strict=True):
            head_logits(program.dispatch, self.last, decoder.head, part, logits)
        return program

    def read_logits(self, device: Device) -> np.ndarray:
        """f32 [batch, vocab]."""
        chunks = [device.read(t.storage.buffer).view(np.float32).reshape(t.shape) for t in self.logits]
        return np.concatenate(chunks, axis=1)


class Step:
    """A program of T rows, recorded on construction. `upload`, then run `program`."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        adapters: AdapterSet | None,
        state: State,
        tokens: int,
        shared_tensors: SharedTensors,
    ):
        self.device, self.state, self.tokens = device, state, tokens
        config, slots = decoder.config, len(adapters.specs) if adapters else 1

        def indices(name: str, size: int) -> Tensor:
            return persistent((size,), "u32", "workspace", f"{name} [{tokens}]")

        self.inputs = StepInputs.declare(config.row_inputs(), tokens, slots, state.tables)
        self.cache_rows, self.picked = indices("cache rows", tokens), indices("picked", state.batch)
        self.newest = indices("newest", state.batch) if state.cache.by_sequence else None
        self.program = Program(device, f"step of {tokens} rows")
        recorder = Recorder(self.program, kept=shared_tensors)
        caches = tuple(state.cache.layer(i, self.cache_rows, self.newest) for i in range(config.num_hidden_layers))
        hidden = decoder.hidden(recorder, self.inputs, adapters.bind(self.inputs) if adapters else {}, caches)
        cols = config.hidden_size
        self.program.dispatch(gather_rows, hidden, self.picked, state.last, rows=state.batch, cols=cols)

    def storages(self) -> set[Storage]:
        """All storage that `upload` fills."""
        indices = (self.cache_rows, self.picked, *([self.newest] if self.newest else []))
        return self.inputs.placed() | {tensor.storage for tensor in indices}

    def upload(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        sequences: np.ndarray,
        lengths: np.ndarray,
        slots: Sequence[int | None],
        picked: np.ndarray,
    ) -> None:
        """Upload up to T tokens, ordered by slot.

        Args:
            ids, positions, sequences: [n <= T] of each token: id, position in its sequence, and sequence.
            lengths: [n], tokens of its sequence so far, those of later steps of a prompt included.
            slots: of each sequence; None, the base model alone, comes last.
            picked: [batch], the row with each sequence's newest hidden state; NOWHERE keeps the previous one.
        """
        size, inputs, device = ids.size, self.inputs, self.device
        assert 0 < size <= self.tokens, f"{size} tokens in a step of {self.tokens}"
        base = sequences.astype(np.int64) * self.state.capacity
        rows = base + positions
        write(device, inputs.ids, padded(ids, self.tokens, 0))
        write(device, self.cache_rows, padded(rows, self.tokens, NOWHERE))
        inputs.place(device, Rows.causal(positions, sequences, rows, base, np.zeros_like(base), lengths))
        slot_ranges = np.zeros(inputs.slot_ranges.shape, np.int64)
        of_rows = np.array([-1 if slot is None else slot for slot in slots])[sequences]
        for slot in range(slot_ranges.shape[0]):
            slot_rows = np.flatnonzero(of_rows == slot)
            if slot_rows.size:
                assert slot_rows[-1] - slot_rows[0] == slot_rows.size - 1, "tokens are not ordered by slot"
                slot_ranges[slot] = slot_rows[0], slot_rows[-1] + 1
        write(device, inputs.slot_ranges, slot_ranges)
        write(device, self.picked, picked)
        if self.newest:
            newest = np.full(self.state.batch, NOWHERE, np.int64)
            newest[sequences] = np.arange(size)  # the last one of each sequence wins
            write(device, self.newest, newest)


@dataclass(frozen=True)
class Programs:
    """All programs of generation: prefill steps (ascending), the decoding step, the head, and the shared state."""

    state: State
    prefill: tuple[Step, ...]
    decode: Step
    head: Program
    shared: Program

    @classmethod
    def record(
        cls,
        device: Device,
        decoder: Decoder,
        adapters: AdapterSet | None,
        batch: int,
        capacity: int,
        buckets: Sequence[int],
    ) -> Programs:
        """Record the programs for `batch` sequences of `capacity` tokens.

        buckets: rows of the prefill steps, ascending.

        Raises:
            BindingTooLarge: a tensor of a layer's state exceeds a binding.
        """
        state, shared_tensors = State.declare(decoder, batch, capacity), SharedTensors(device)
        state.check(device.max_binding)
        useful = [size for size, before in zip(buckets, (0, *buckets), strict=False) if before < batch * capacity]
        *prefill, decode = [Step(device, decoder, adapters, state, size, shared_tensors) for size in [*useful, batch]]
        return cls(state, tuple(prefill), decode, state.record_head(device, decoder), shared_tensors.program)

    def all(self) -> list[Program]:
        return [self.shared, self.head, *(step.program for step in (*self.prefill, self.decode))]

    def storages(self) -> set[Storage]:
        """All storage that is not in an arena, including weights and adapters."""
        steps = (step.storages() for step in (*self.prefill, self.decode))
        return self.state.storages().union(*steps, *(program.persistent_storages() for program in self.all()))
