"""The inputs of a step: token ids, positions, slots, targets and the inputs that the architecture asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from wgpu_lora.gpu.tensor import NUMPY, Storage, Tensor, persistent
from wgpu_lora.models.row_inputs import NOWHERE, PositionTable, RowInput, Rows
from wgpu_lora.ops.loss.loss import Targets

if TYPE_CHECKING:
    from wgpu_lora.gpu.device import Device


@dataclass(frozen=True)
class Segment:
    """A row of data in a batch.

    input_ids: int [len].
    labels: unshifted, -100 where no log-probability is needed, as in transformers; None if it is needed nowhere.
    slot: whose adapter applies; None for the base alone.
    draws: u32 [len, 4], dropout keys; None without dropout.
    prefix: how many leading tokens, with the same draws, are those of the segment before, whose rows it shares; they
        predict no labelled token of this segment.
    """

    input_ids: np.ndarray
    labels: np.ndarray | None = None
    slot: int | None = 0
    draws: np.ndarray | None = None
    prefix: int = 0

    @property
    def tokens(self) -> int:
        """The rows that the segment adds to a batch."""
        return len(self.input_ids) - self.prefix


class Tables(dict[PositionTable, Tensor]):
    """An architecture's tables, shared by all steps of a model."""

    positions: int

    @classmethod
    def declare(cls, tables: Iterable[PositionTable], positions: int) -> Tables:
        """Declares tables for sequences of up to `positions` tokens, without allocating them."""
        result = cls({t: persistent(t.shape(positions), "f32", "workspace", type(t).__name__) for t in tables})
        result.positions = positions
        return result

    def storages(self) -> set[Storage]:
        return {tensor.storage for tensor in self.values()}

    def upload(self, device: Device) -> None:
        for table, tensor in self.items():
            device.write(tensor.storage.buffer, table.values(self.positions))


@dataclass
class StepInputs:
    """The input tensors of a step of T rows. `tables` are shared by steps of different sizes.

    rows: the inputs that the architecture asks for (`ModelConfig.row_inputs`). slot_ranges: u32 [slots, 2].
    """

    ids: Tensor
    positions: Tensor
    rows: dict[RowInput, Tensor]
    slot_ranges: Tensor
    draws: Tensor | None
    targets: Targets
    tables: Tables

    @classmethod
    def declare(
        cls, inputs: Iterable[RowInput], tokens: int, slots: int, tables: Tables, dropout: bool = False
    ) -> StepInputs:
        """Declares the inputs of a step. inputs: see `ModelConfig.row_inputs`."""

        def make(name: str, *shape: int, dtype: str = "u32") -> Tensor:
            return persistent(shape, dtype, "workspace", f"{name} [{tokens}]")

        return cls(
            ids=make("ids", tokens),
            positions=make("positions", tokens),
            rows={item: make(str(item), tokens, *([item.width] if item.width > 1 else [])) for item in inputs},
            slot_ranges=make("slot ranges", slots, 2),
            draws=make("draws", tokens, 4) if dropout else None,
            targets=Targets(
                rows=make("target rows", tokens), ids=make("targets", tokens), count=make("target count", 1)
            ),
            tables=tables,
        )

    @property
    def tokens(self) -> int:
        return self.ids.size

    def placed(self) -> set[Storage]:
        """The storages that a step without a loss uploads: all except targets."""
        tensors = (self.ids, self.positions, *self.rows.values(), self.slot_ranges)
        return {t.storage for t in tensors}

    def storages(self) -> set[Storage]:
        """All storages that `upload` fills, and the tables."""
        targets = (self.targets.rows, self.targets.ids, self.targets.count)
        tensors = (*targets, *([self.draws] if self.draws else []))
        return self.placed() | self.tables.storages() | {t.storage for t in tensors}

    def upload(self, device: Device, segments: Sequence[Segment]) -> np.ndarray:
        """Packs segments, ordered by slot, into a batch and uploads it; returns [start, stop) of each one's targets.

        Tokens are predicted from their own segment only. The rest of the batch is padding.
        """
        size = self.tokens
        ids, draws = np.zeros(size, np.uint32), np.zeros((size, 4), np.uint32)
        draws[:, 3] = np.float32(1).view(np.uint32)
        slots = self.slot_ranges.shape[0]
        slot_ranges, spans = np.zeros((slots, 2), np.uint32), np.zeros((len(segments), 2), np.int64)
        owners = [slots if segment.slot is None else segment.slot for segment in segments]
        order = sorted(range(len(segments)), key=owners.__getitem__)
        placing = ForkPlacement(size)
        targets, target_rows, count = [], [], 0
        for number, rows in zip(order, placing.add([segments[i] for i in order]), strict=True):
            segment = segments[number]
            ids[rows] = segment.input_ids
            if segment.draws is not None:
                draws[rows] = segment.draws
            positions = np.zeros(0, np.int64)
            if segment.labels is not None:
                positions = np.flatnonzero(segment.labels[1:] != -100)
                target_rows.append(rows[positions])
                targets.append(segment.labels[1:][positions])
            if segment.slot is not None:
                extend_range(slot_ranges[segment.slot], rows.min(), rows.max() + 1)
            spans[number] = count, count + positions.size
            count += positions.size
        write(device, self.ids, ids)
        self.place(device, placing.rows)
        write(device, self.slot_ranges, slot_ranges)
        if self.draws:
            write(device, self.draws, draws)
        write(device, self.targets.rows, _padded(target_rows, size, NOWHERE))
        write(device, self.targets.ids, _padded(targets, size, 0))
        write(device, self.targets.count, np.array([count]))
        return spans

    def place(self, device: Device, rows: Rows) -> None:
        """Uploads the positions of n <= T rows and the inputs that the architecture asks for.

        Raises:
            IndexError: a position is past the tables, from which the device would read something else.
        """
        if self.tables and (last := int(rows.positions.max(initial=0))) >= self.tables.positions:
            raise IndexError(f"position {last} is past tables of {self.tables.positions} positions")
        write(device, self.positions, padded(rows.positions, self.tokens, 0))
        for item, tensor in self.rows.items():
            values = item.values(rows)
            write(device, tensor, padded(values, self.tokens, item.padding(values)))


def write(device: Device, tensor: Tensor, values: np.ndarray) -> None:
    """Uploads values, converted to the tensor's dtype."""
    device.write(tensor.storage.buffer, values.astype(NUMPY[tensor.dtype]))


def padded(values: np.ndarray, size: int, filler: np.ndarray | int) -> np.ndarray:
    """Rows [n, ...] padded with `filler` to [size, ...]."""
    result = np.empty((size, *values.shape[1:]), values.dtype)
    result[: len(values)], result[len(values) :] = values, filler
    return result


def _padded(parts: list[np.ndarray], size: int, filler: float) -> np.ndarray:
    values = np.concatenate([*parts, np.zeros(0)])
    return np.concatenate([values, np.full(size - values.size, filler)])


class HasTokens(Protocol):
    """A sequence of tokens that can be placed, of which the first `prefix` are those of the sequence before."""

    @property
    def input_ids(self) -> np.ndarray: ...

    @property
    def prefix(self) -> int: ...


class ForkPlacement:
    """Places in a batch of `size` rows; what is not placed is padding, which only sees itself."""

    def __init__(self, size: int):
        row = np.arange(size, dtype=np.int64)
        self.at, self.size = 0, size
        self.rows = Rows(
            positions=0 * row,
            sequences=row.copy(),
            keys=row,
            first=row.copy(),
            stop=row + 1,
            first_viewer=row.copy(),
            last_viewer=row + 1,
            lengths=0 * row + 1,
        )

    def add(self, sequences: Sequence[HasTokens]) -> Iterator[np.ndarray]:
        """Place sequences behind those already placed; gives the rows of each one's tokens, int64 [len].

        In a fork, the second sequence must follow the first.
        """
        following = [*[sequence.prefix for sequence in sequences[1:]], 0]
        for sequence, prefix in zip(sequences, following, strict=True):
            if sequence.prefix:
                yield self._tail(len(sequence.input_ids), sequence.prefix)
            elif prefix:
                yield self._head(len(sequence.input_ids), prefix)
            else:
                yield self._alone(len(sequence.input_ids))

    def _take(self, count: int) -> slice:
        span = slice(self.at, self.at + count)
        assert span.stop <= self.size, f"{span.stop} tokens do not fit a batch of {self.size}"
        self.at = span.stop
        return span

    def _alone(self, length: int) -> np.ndarray:
        span, rows = self._take(length), self.rows
        rows.positions[span] = np.arange(length)
        rows.sequences[span] = rows.first[span] = span.start
        rows.last_viewer[span] = span.stop
        rows.lengths[span] = length
        return rows.keys[span]

    def _head(self, length: int, prefix: int) -> np.ndarray:
        """The first sequence of a fork, including the common tokens."""
        span, rows = self._take(length), self.rows
        fork = span.stop - prefix
        suffix, common = slice(span.start, fork), slice(fork, span.stop)
        rows.positions[suffix], rows.positions[common] = np.arange(length)[prefix:][::-1], np.arange(prefix)
        rows.sequences[span] = rows.first_viewer[span] = span.start
        rows.stop[suffix] = span.stop
        rows.first[common] = fork
        rows.last_viewer[common] = span.stop
        rows.lengths[span] = length
        return np.concatenate([rows.keys[common], rows.keys[suffix][::-1]])

    def _tail(self, length: int, prefix: int) -> np.ndarray:
        """The second sequence of a fork."""
        fork, rows = self.at - prefix, self.rows
        span = self._take(length - prefix)
        rows.positions[span] = np.arange(prefix, length)
        rows.sequences[span], rows.first[span] = fork, fork
        rows.lengths[span] = length
        rows.last_viewer[fork : span.stop] = span.stop
        return rows.keys[fork : span.stop]


def extend_range(span: np.ndarray, start: int, stop: int) -> None:
    """Extend the range [start, stop), empty at first."""
    span[:] = (start, stop) if span[1] == 0 else (min(span[0], start), max(span[1], stop))
