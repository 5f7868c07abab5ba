"""The recorded programs of generation: passes over pieces of prompts, or over a token of each sequence; and the choice
of the next tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import BindingTooLarge
from wgpu_lora.gpu.kernel import cdiv
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Storage, Tensor, persistent
from wgpu_lora.models.adapter_set import AdapterSet
from wgpu_lora.models.batch_inputs import StepInputs, Tables, padded, write
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.kv_cache import Cache
from wgpu_lora.models.row_inputs import NOWHERE, Rows
from wgpu_lora.names.text import count_noun
from wgpu_lora.ops.attention.attention import BLOCK
from wgpu_lora.ops.embedding import gather_rows, head_logits
from wgpu_lora.ops.loss.loss import softmax_chunk
from wgpu_lora.ops.loss.sampling import PARAMS, edit_scores, mask_logits, sample_tokens
from wgpu_lora.ops.loss.sparse_logits import top_k
from wgpu_lora.ops.recorder import Recorder, SharedTensors

BUCKETS = (
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
)  # rows of the prefill programs; each is compiled when a prompt first needs it
EDITS = 4096  # of scores, in one dispatch
TOP = 20  # tokens whose log-probabilities can be returned beside the token's own


@dataclass(frozen=True)
class EngineLimits:
    """The sizes that programs are recorded for.

    sequences: that run together. tokens: of a sequence. blocks: of the cache, BLOCK tokens each.
    buckets: rows of the prefill steps, ascending. temperature: of log-probabilities.
    """

    sequences: int
    tokens: int
    blocks: int
    buckets: tuple[int, ...] = BUCKETS
    cache_dtype: str = "f32"
    temperature: float = 1.0

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the decoding steps, ascending."""
        return (*(1 << i for i in range((self.sequences - 1).bit_length())), self.sequences)


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, ordered by slot; those of a sequence are consecutive and in order.

    ids, positions, sequences: int64 [n] of each row: token, position in its sequence, and the sequence's index.
    slots: of each row, -1 for the base model alone, which comes last.
    blocks: of each sequence in the order of the rows, the cache's blocks with its tokens up to the last of the step.
    lengths: of each row, tokens of its sequence so far, those of later steps of a prompt included.
    logits_indices: [k], the rows whose hidden states are kept as the rows first, first + 1, ... of the head.
    """

    ids: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray
    slots: np.ndarray
    blocks: Sequence[Sequence[int]]
    lengths: np.ndarray
    logits_indices: np.ndarray
    first: int = 0


class EngineState:
    """The tensors that all programs share: the cache, the newest hidden states, and what tokens are chosen by.

    With n sequences, hidden: f32 [n, hidden_size]. logits: f32 [n, chunk] per chunk of the head. scores: f32
    [n, vocab].
    masked: u32 [n]; masks: u32 [n, vocab / 32]; params: u32 [n, 8]. ids: u32 [n].
    targets, softmax, top, top_ids: of log-probabilities: u32 [n], f32 [n, 4], and [n, TOP] twice.
    """

    def __init__(self, decoder: Decoder, limits: EngineLimits):
        config, self.limits, rows = decoder.config, limits, limits.sequences

        def make(name: str, *shape: int, dtype: str = "u32", group: str = "workspace") -> Tensor:
            return persistent(shape, dtype, group, name)

        self.vocab = config.vocab_size
        layers = [config.cache(i) for i in range(config.num_hidden_layers)]
        self.cache = Cache.declare(layers, rows, BLOCK * limits.blocks, limits.cache_dtype)
        self.tables = Tables.declare(config.tables(), limits.tokens)
        self.blocks = make("blocks", rows * cdiv(limits.tokens, BLOCK))
        self.hidden = make("newest hidden states", rows, config.hidden_size, dtype="f32")
        chunks = [(first, part.rows) for first, part in decoder.head.chunks()]
        self.logits = tuple(make(f"logits {first}", rows, size, dtype="f32") for first, size in chunks)
        self.scores = make("scores", rows, self.vocab, dtype="f32")
        self.masked, self.masks = make("masked", rows), make("masks", rows, cdiv(self.vocab, 32))
        self.params, self.ids = make("sampling", rows, PARAMS.itemsize // 4), make("tokens", rows)
        self.edits = make("edits", EDITS, 4)
        self.targets, self.count = make("targets", rows), make("target count", 1)
        self.softmax, self.rescale = make("softmax", rows, 4, dtype="f32"), make("rescale", rows, dtype="f32")
        top_size = min(TOP, self.vocab)
        self.top = tuple(make(f"top {i}", rows, top_size, dtype="f32") for i in range(2))
        self.top_ids = tuple(make(f"top ids {i}", rows, top_size) for i in range(2))

    def check(self, max_binding: int) -> None:
        """Raise BindingTooLarge if a tensor of a layer's state, or the scores, exceed a binding."""
        name, nbytes = self.cache.largest()
        if nbytes > max_binding:
            raise BindingTooLarge(f"{name} of {BLOCK * self.limits.blocks:,} tokens", nbytes, max_binding)
        if self.scores.nbytes > max_binding:
            label = f"scores of {count_noun(self.limits.sequences, 'sequence')}"
            raise BindingTooLarge(label, self.scores.nbytes, max_binding)

    def storages(self) -> set[Storage]:
        own = (value for value in vars(self).values() if isinstance(value, Tensor | tuple))
        tensors = (t for value in own for t in ((value,) if isinstance(value, Tensor) else value))
        return {t.storage for t in tensors} | self.cache.storages() | self.tables.storages()


class Step:
    """A program of T rows, recorded on construction. `upload`, then run `program`. decoding: see `Program`."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        adapters: AdapterSet | None,
        state: EngineState,
        tokens: int,
        shared_tensors: SharedTensors,
        decoding: bool,
    ):
        self.device, self.state, self.tokens = device, state, tokens
        config, slots = decoder.config, len(adapters.specs) if adapters else 1
        kind = "decoding" if decoding else "prefill"

        def indices(name: str, size: int) -> Tensor:
            return persistent((size,), "u32", "workspace", f"{name} of {kind} [{tokens}]")

        self.inputs = StepInputs.declare(config.row_inputs(), tokens, slots, state.tables)
        sequences = state.limits.sequences
        self.cache_rows, self.logits_indices = indices("cache rows", tokens), indices("picked", sequences)
        self.newest = indices("newest", sequences) if not state.cache.shares_prefixes else None
        self.program = Program(device, f"{kind} of {tokens} rows", decoding)
        recorder = Recorder(self.program, shared_tensors=shared_tensors)
        caches = tuple(
            state.cache.layer(i, self.cache_rows, state.blocks, self.newest) for i in range(config.num_hidden_layers)
        )
        hidden = decoder.hidden(recorder, self.inputs, adapters.bind(self.inputs) if adapters else {}, caches)
        cols = config.hidden_size
        self.program.dispatch(gather_rows, hidden, self.logits_indices, state.hidden, rows=sequences, cols=cols)

    def storages(self) -> set[Storage]:
        """All storage that `upload` fills."""
        indices = (self.cache_rows, self.logits_indices, *([self.newest] if self.newest else []))
        return self.inputs.placed() | {tensor.storage for tensor in indices}

    def upload(self, rows: StepRows) -> None:
        """Upload up to T rows."""
        size, inputs, device = rows.ids.size, self.inputs, self.device
        assert 0 < size <= self.tokens, f"{size} tokens in a step of {self.tokens}"
        # Keys are counted as if the blocks of the step's sequences were one after the other.
        counts = np.array([len(blocks) for blocks in rows.blocks])
        of_rows = np.cumsum(np.diff(rows.sequences, prepend=rows.sequences[0]) != 0)  # each row's index among them
        base = BLOCK * (np.cumsum(counts) - counts)[of_rows]
        table = np.concatenate([np.asarray(blocks, np.int64) for blocks in rows.blocks])
        keys = base + rows.positions
        write(device, inputs.ids, padded(rows.ids, self.tokens, 0))
        write(device, self.cache_rows, padded(table[keys // BLOCK] * BLOCK + keys % BLOCK, self.tokens, NOWHERE))
        device.write(self.state.blocks.storage.buffer, table.astype(np.uint32))
        inputs.place(device, Rows.causal(rows.positions, rows.sequences, keys, base, np.zeros_like(base), rows.lengths))
        slot_ranges = np.zeros(inputs.slot_ranges.shape, np.int64)
        for slot in np.unique(rows.slots[rows.slots >= 0]):
            slot_rows = np.flatnonzero(rows.slots == slot)
            assert slot_rows[-1] - slot_rows[0] == slot_rows.size - 1, "tokens are not ordered by slot"
            slot_ranges[slot] = slot_rows[0], slot_rows[-1] + 1
        write(device, inputs.slot_ranges, slot_ranges)
        indices = np.full(self.state.limits.sequences, NOWHERE, np.int64)
        indices[rows.first : rows.first + rows.logits_indices.size] = rows.logits_indices
        write(device, self.logits_indices, indices)
        if self.newest:
            newest = np.full(self.state.limits.sequences, NOWHERE, np.int64)
            newest[rows.sequences] = np.arange(size)  # the last one of each sequence wins
            write(device, self.newest, newest)


class Head:
    """The programs that choose the next tokens of the first `rows` rows of the newest hidden states.

    logits: computes logits, and scores from them and the masks. sample: tokens from scores. choose: both, if there are
    no edits in between. logprobs: the softmax's state with the targets' logits, and the TOP largest logits, after which
    the logits are lost.
    """

    def __init__(self, device: Device, decoder: Decoder, state: EngineState, rows: int):
        self.logits = Program(device, f"head of {rows} rows", decoding=True)
        self.choose = Program(device, f"head of {rows} rows with choice of tokens", decoding=True)
        self.sample = Program(device, f"choice of {rows} tokens")
        self.logprobs = Program(device, f"log-probabilities of {rows} rows")

        def first_rows(tensor: Tensor) -> Tensor:
            return tensor.rows(0, rows)

        scores, top_size = first_rows(state.scores), state.top[0].shape[1]
        for number, ((first, part), whole) in enumerate(zip(decoder.head.chunks(), state.logits, strict=True)):
            logits = first_rows(whole)
            shape: dict[str, Any] = {"rows": rows, "cols": part.rows, "first": first}
            for program in (self.logits, self.choose):
                head_logits(program.dispatch, first_rows(state.hidden), decoder.head, part, logits)
                masks = first_rows(state.masked), first_rows(state.masks)
                program.dispatch(mask_logits, logits, *masks, scores, vocab=state.vocab, **shape)
            new, old = number % 2, (number + 1) % 2
            largest = (state.top[old], state.top_ids[old], state.top[new], state.top_ids[new])
            self.logprobs.dispatch(top_k, logits, state.count, *map(first_rows, largest), k=top_size, **shape)
            of_softmax = (first_rows(state.targets), state.count, first_rows(state.softmax), first_rows(state.rescale))
            rate = 1 / state.limits.temperature
            self.logprobs.dispatch(softmax_chunk, logits, *of_softmax, **shape, rate=rate, entropy=True)
        self.last = (len(state.logits) - 1) % 2  # which of the state's `top` has the result
        for program in (self.choose, self.sample):
            program.dispatch(
                sample_tokens, scores, first_rows(state.params), first_rows(state.ids), rows=rows, cols=state.vocab
            )

    def programs(self) -> tuple[Program, ...]:
        return self.logits, self.sample, self.choose, self.logprobs


class Programs:
    """All programs of an engine, and the state they share.

    prefill: by rows, ascending. decode, heads: by rows. edits: of EDITS scores. shared: runs once, before all others.

    Raises:
        BindingTooLarge: a tensor of a layer's state exceeds a binding.
    """

    def __init__(self, device: Device, decoder: Decoder, adapters: AdapterSet | None, limits: EngineLimits):
        self.limits, self.state = limits, EngineState(decoder, limits)
        self.state.check(device.max_binding)
        shared_tensors, max_tokens = SharedTensors(device), limits.sequences * limits.tokens
        buckets = [
            size for size, before in zip(limits.buckets, (0, *limits.buckets), strict=False) if before < max_tokens
        ]

        def step(size: int, decoding: bool) -> Step:
            return Step(device, decoder, adapters, self.state, size, shared_tensors, decoding)

        self.prefill = {size: step(size, False) for size in buckets}
        self.decode = {size: step(size, True) for size in limits.rows}
        self.heads = {size: Head(device, decoder, self.state, size) for size in limits.rows}
        self.edits, self.shared = Program(device, "edits"), shared_tensors.program
        self.edits.dispatch(edit_scores, self.state.edits, self.state.scores, count=EDITS)

    def steps(self) -> Iterable[Step]:
        return (*self.prefill.values(), *self.decode.values())

    def all(self) -> list[Program]:
        heads = [program for head in self.heads.values() for program in head.programs()]
        return [self.shared, self.edits, *heads, *(step.program for step in self.steps())]

    def storages(self) -> set[Storage]:
        """All storage that is not in an arena, including weights and adapters."""
        inputs = (step.storages() for step in self.steps())
        return self.state.storages().union(*inputs, *(program.persistent_storages() for program in self.all()))
