"""One pass over T rows with a KV cache: a piece of prompts (prefill) or one token of each sequence (decode)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wgpu_lora.errors import NoRoomError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import NUMPY, Storage, Tensor, persistent
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.decoder import Decoder, KVCache
from wgpu_lora.models.inputs import NOWHERE, StepInputs, rope_table
from wgpu_lora.models.lora import AdapterSet
from wgpu_lora.ops.embedding import gather_rows
from wgpu_lora.ops.matmul import matmul_nt
from wgpu_lora.ops.recorder import Kept, Recorder


def write(device: Device, tensor: Tensor, values: np.ndarray) -> None:
    device.write(tensor.storage.buffer, values.astype(NUMPY[tensor.dtype]))


@dataclass(frozen=True)
class State:
    """What all steps of a batch of sequences share. Sequence b owns the cache rows from b * capacity.

    last f32 [batch, hidden]: each sequence's newest hidden state. logits: f32 [batch, chunk] by chunk of the head.
    """

    batch: int
    capacity: int
    cache: KVCache
    rope_table: Tensor
    last: Tensor
    logits: tuple[Tensor, ...]

    @classmethod
    def declare(cls, decoder: Decoder, batch: int, capacity: int) -> State:
        config = decoder.config

        def make(name: str, *shape: int) -> Tensor:
            return persistent(shape, "f32", "workspace", name)

        nowhere = persistent((1,), "u32", "workspace", "cache rows")  # each step has its own instead
        return cls(
            batch,
            capacity,
            KVCache.declare(config, batch * capacity, nowhere),
            make("rope", capacity, config.head_dim // 2, 2),
            make("last hidden", batch, config.hidden_size),
            tuple(make(f"logits {first}", batch, part.shape[0]) for first, part in decoder.head.chunks()),
        )

    def check(self, max_binding: int) -> None:
        """Raises NoRoomError where a layer's keys cannot be bound whole."""
        nbytes = self.cache.keys[0].nbytes
        if nbytes > max_binding:
            raise NoRoomError(
                f"The keys of {self.batch} sequences of {self.capacity:,} tokens take {nbytes:,} bytes a layer, but a "
                f"binding of this device holds at most {max_binding:,}: use a smaller capacity or batch."
            )

    def storages(self) -> set[Storage]:
        tensors = (*self.cache.keys, *self.cache.values, self.rope_table, self.last, *self.logits)
        return {t.storage for t in tensors}

    def upload(self, device: Device, config: ModelConfig) -> None:
        """Fills what never changes."""
        write(device, self.rope_table, rope_table(config, self.capacity))

    def record_head(self, device: Device, decoder: Decoder) -> Program:
        """last -> logits."""
        program = Program(device, "head")
        m, k, kind = self.batch, decoder.config.hidden_size, decoder.head.dtype
        for (_, part), logits in zip(decoder.head.chunks(), self.logits, strict=True):
            program.dispatch(matmul_nt, self.last, part, logits, m=m, n=part.shape[0], k=k, b_type=kind)
        return program

    def read_logits(self, device: Device) -> np.ndarray:
        """f32 [batch, vocab]."""
        chunks = [device.read(t.storage.buffer).view(np.float32).reshape(t.shape) for t in self.logits]
        return np.concatenate(chunks, axis=1)


class Step:
    """A program of T rows, recorded on construction. `upload`, then run `program`."""

    def __init__(
        self, device: Device, decoder: Decoder, adapters: AdapterSet | None, state: State, tokens: int, kept: Kept
    ):
        self.device, self.state, self.tokens = device, state, tokens
        slots = len(adapters.specs) if adapters else 1
        self.inputs = StepInputs.declare(decoder.config, tokens, slots, state.rope_table)
        self.cache_rows = persistent((tokens,), "u32", "workspace", f"cache rows [{tokens}]")
        self.picked = persistent((state.batch,), "u32", "workspace", f"picked [{tokens}]")
        self.program = Program(device, f"step of {tokens} rows")
        recorder = Recorder(self.program, kept=kept)
        cache = replace(state.cache, rows=self.cache_rows)
        hidden = decoder.hidden(recorder, self.inputs, adapters.bind(self.inputs) if adapters else {}, cache)
        cols = decoder.config.hidden_size
        self.program.dispatch(gather_rows, hidden, self.picked, state.last, rows=state.batch, cols=cols)

    def storages(self) -> set[Storage]:
        """Everything that `upload` fills."""
        inputs = self.inputs
        tensors = [
            inputs.ids,
            inputs.positions,
            *inputs.ranges.values(),
            inputs.slot_ranges,
            self.cache_rows,
            self.picked,
        ]
        return {t.storage for t in tensors}

    def upload(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        sequences: np.ndarray,
        slots: Sequence[int | None],
        picked: np.ndarray,
    ) -> None:
        """Places up to T tokens, ordered by slot.

        Args:
            ids, positions, sequences: [n <= T] of each token: its id, its place in its sequence, which sequence.
            slots: of each sequence; None, the base alone, comes last.
            picked: [batch], the row whose hidden state is each sequence's newest; NOWHERE leaves the one before.
        """
        size, inputs = ids.size, self.inputs
        assert 0 < size <= self.tokens, f"{size} tokens in a step of {self.tokens}"
        base = sequences.astype(np.int64) * self.state.capacity
        rows = base + positions
        self._write(inputs.ids, ids, 0)
        self._write(inputs.positions, positions, 0)
        self._write(self.cache_rows, rows, NOWHERE)
        for window, tensor in inputs.ranges.items():
            first = base if window is None else np.maximum(base, rows - window + 1)
            # Padding sees nothing. Its empty range lies where the last row's begins: a subgroup walks the keys from
            # the least first to the greatest last of its rows, and must not be sent through the whole cache.
            ranges = np.zeros((self.tokens, 4), np.int64)
            ranges[:size, 0], ranges[:size, 1] = first, rows + 1
            ranges[size:, :2] = first[-1]
            write(self.device, tensor, ranges)
        slot_ranges = np.zeros(inputs.slot_ranges.shape, np.int64)
        of_rows = np.array([-1 if slot is None else slot for slot in slots])[sequences]
        for slot in range(slot_ranges.shape[0]):
            mine = np.flatnonzero(of_rows == slot)
            if mine.size:
                assert mine[-1] - mine[0] == mine.size - 1, "tokens are not ordered by slot"
                slot_ranges[slot] = mine[0], mine[-1] + 1
        write(self.device, inputs.slot_ranges, slot_ranges)
        write(self.device, self.picked, picked)

    def _write(self, tensor: Tensor, values: np.ndarray, filler: int) -> None:
        write(self.device, tensor, np.pad(values, (0, self.tokens - values.size), constant_values=filler))


@dataclass(frozen=True)
class Programs:
    """Everything that generating runs: prefill steps (ascending), the decoding step, the head, and what is kept."""

    state: State
    prefill: tuple[Step, ...]
    decode: Step
    head: Program
    kept: Program

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
        """For `batch` sequences of `capacity` tokens; buckets: rows of the prefill steps, ascending.

        Raises:
            NoRoomError: a layer's keys cannot be bound whole.
        """
        state, kept = State.declare(decoder, batch, capacity), Kept(device)
        state.check(device.max_binding)
        useful = [size for size, before in zip(buckets, (0, *buckets), strict=False) if before < batch * capacity]
        *prefill, decode = [Step(device, decoder, adapters, state, size, kept) for size in [*useful, batch]]
        return cls(state, tuple(prefill), decode, state.record_head(device, decoder), kept.program)

    def all(self) -> list[Program]:
        return [self.kept, self.head, *(step.program for step in (*self.prefill, self.decode))]

    def storages(self) -> set[Storage]:
        """All that is not in an arena, weights and adapters too."""
        steps = (step.storages() for step in (*self.prefill, self.decode))
        return self.state.storages().union(*steps, *(program.persistent_storages() for program in self.all()))
