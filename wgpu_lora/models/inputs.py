"""What a step uploads: token ids, where each row of the batch belongs, and what the architecture asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wgpu_lora.gpu.tensor import NUMPY, Storage, Tensor, persistent
from wgpu_lora.models.rows import NOWHERE, RowInput, Rows, Table
from wgpu_lora.ops.loss import Targets

if TYPE_CHECKING:
    from wgpu_lora.gpu.device import Device


@dataclass(frozen=True)
class Segment:
    """One row of data in a batch.

    labels are unshifted, -100 where no log-probability is wanted, as Hugging Face has them; None where none is at all.
    slot: whose adapter applies (None: the base alone). draws: u32 [len, 4], what dropout is drawn from; None without
    dropout.
    """

    input_ids: np.ndarray
    labels: np.ndarray | None = None
    slot: int | None = 0
    draws: np.ndarray | None = None


class Tables(dict[Table, Tensor]):
    """An architecture's tables, which all steps of a model share."""

    positions: int

    @classmethod
    def declare(cls, tables: Iterable[Table], positions: int) -> Tables:
        """For sequences of up to `positions` tokens; nothing is allocated."""
        made = cls({t: persistent(t.shape(positions), "f32", "workspace", type(t).__name__) for t in tables})
        made.positions = positions
        return made

    def storages(self) -> set[Storage]:
        return {tensor.storage for tensor in self.values()}

    def upload(self, device: Device) -> None:
        for table, tensor in self.items():
            device.write(tensor.storage.buffer, table.values(self.positions))


@dataclass
class StepInputs:
    """The tensors of one step of T rows. `tables` are shared between steps of different T.

    rows: what the architecture asks for. slot_ranges u32 [slots, 2].
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
        cls, asked: Iterable[RowInput], tokens: int, slots: int, tables: Tables, dropout: bool = False
    ) -> StepInputs:
        """asked: see ModelConfig.row_inputs."""

        def make(name: str, *shape: int, dtype: str = "u32") -> Tensor:
            return persistent(shape, dtype, "workspace", f"{name} [{tokens}]")

        return cls(
            ids=make("ids", tokens),
            positions=make("positions", tokens),
            rows={item: make(str(item), tokens, *([item.width] if item.width > 1 else [])) for item in asked},
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
        """What says which tokens there are and where they belong: all that a step without a loss uploads."""
        tensors = (self.ids, self.positions, *self.rows.values(), self.slot_ranges)
        return {t.storage for t in tensors}

    def storages(self) -> set[Storage]:
        """Everything that `upload` fills, and the tables."""
        targets = (self.targets.rows, self.targets.ids, self.targets.count)
        tensors = (*targets, *([self.draws] if self.draws else []))
        return self.placed() | self.tables.storages() | {t.storage for t in tensors}

    def upload(self, device: Device, segments: Sequence[Segment]) -> np.ndarray:
        """Lays segments side by side, ordered by slot, and uploads them; returns [start, stop) of each one's targets.

        A token's successor is predicted only within its own segment; what is left of the batch is padding, each
        row of which sees itself alone.
        """
        size = self.tokens
        ids, positions = np.zeros(size, np.uint32), np.zeros(size, np.int64)
        row = np.arange(size, dtype=np.int64)
        first, last, numbers = row.copy(), row + 1, row.copy()
        draws = np.zeros((size, 4), np.uint32)
        draws[:, 3] = np.float32(1).view(np.uint32)
        slots = self.slot_ranges.shape[0]
        slot_ranges, places = np.zeros((slots, 2), np.uint32), np.zeros((len(segments), 2), np.int64)
        rows, targets = [], []
        at = count = 0
        owners = [slots if segment.slot is None else segment.slot for segment in segments]
        for number in sorted(range(len(segments)), key=owners.__getitem__):
            segment = segments[number]
            length = len(segment.input_ids)
            stop = at + length
            assert stop <= size, f"{stop} tokens do not fit a batch of {size}"
            ids[at:stop], positions[at:stop] = segment.input_ids, np.arange(length)
            first[at:stop], last[at:stop], numbers[at:stop] = at, stop, at
            if segment.draws is not None:
                draws[at:stop] = segment.draws
            picked = np.zeros(0, np.int64) if segment.labels is None else np.flatnonzero(segment.labels[1:] != -100)
            if segment.labels is not None:
                rows.append(at + picked)
                targets.append(segment.labels[1:][picked])
            if segment.slot is not None:
                slot_ranges[segment.slot] = (
                    at if slot_ranges[segment.slot, 1] == 0 else slot_ranges[segment.slot, 0],
                    stop,
                )
            places[number] = count, count + picked.size
            at, count = stop, count + picked.size
        write(device, self.ids, ids)
        self.place(device, Rows(positions, numbers, row, first, last))
        write(device, self.slot_ranges, slot_ranges)
        if self.draws:
            write(device, self.draws, draws)
        write(device, self.targets.rows, _padded(rows, size, NOWHERE))
        write(device, self.targets.ids, _padded(targets, size, 0))
        write(device, self.targets.count, np.array([count]))
        return places

    def place(self, device: Device, rows: Rows) -> None:
        """Uploads positions and what the architecture asks of these n <= T rows."""
        write(device, self.positions, padded(rows.positions, self.tokens, 0))
        for item, tensor in self.rows.items():
            values = item.values(rows)
            write(device, tensor, padded(values, self.tokens, item.padding(values)))


def write(device: Device, tensor: Tensor, values: np.ndarray) -> None:
    """Uploads values as the tensor's own type."""
    device.write(tensor.storage.buffer, values.astype(NUMPY[tensor.dtype]))


def padded(values: np.ndarray, size: int, filler: np.ndarray | int) -> np.ndarray:
    """Rows [n, ...] and behind them `filler`, [size, ...] together."""
    result = np.empty((size, *values.shape[1:]), values.dtype)
    result[: len(values)], result[len(values) :] = values, filler
    return result


def _padded(parts: list[np.ndarray], size: int, filler: float) -> np.ndarray:
    joined = np.concatenate([*parts, np.zeros(0)])
    return np.concatenate([joined, np.full(size - joined.size, filler)])
