"""What a step uploads: token ids, where each row of the batch belongs, and what the architecture asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wgpu_lora.gpu.tensor import NUMPY, Storage, Tensor, persistent
from wgpu_lora.models.rows import NOWHERE, RowInput, Rows, Table
from wgpu_lora.ops.loss import LossInputs

if TYPE_CHECKING:
    from wgpu_lora.gpu.device import Device


@dataclass(frozen=True)
class Segment:
    """One row of data in a batch.

    labels are unshifted, -100 where untrained, as Hugging Face has them; None where nothing is trained.
    slot: whose adapter applies (None: the base alone). weight: of each trained token's loss, 1 / the slot's trained
    tokens of the whole optimizer step. draws: u32 [len, 4], what dropout is drawn from; None without dropout.
    """

    input_ids: np.ndarray
    labels: np.ndarray | None = None
    slot: int | None = 0
    weight: float = 1.0
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
    loss: LossInputs
    tables: Tables

    @classmethod
    def declare(
        cls,
        asked: Iterable[RowInput],
        tokens: int,
        slots: int,
        tables: Tables,
        total: Tensor,
        dropout: bool = False,
    ) -> StepInputs:
        """asked: see ModelConfig.row_inputs. total: f32 [slots], where losses are summed."""

        def make(name: str, *shape: int, dtype: str = "u32") -> Tensor:
            return persistent(shape, dtype, "workspace", f"{name} [{tokens}]")

        return cls(
            ids=make("ids", tokens),
            positions=make("positions", tokens),
            rows={item: make(str(item), tokens, *([item.width] if item.width > 1 else [])) for item in asked},
            slot_ranges=make("slot ranges", slots, 2),
            draws=make("draws", tokens, 4) if dropout else None,
            loss=LossInputs(
                rows=make("trained rows", tokens),
                targets=make("targets", tokens),
                weight=make("token weights", tokens, dtype="f32"),
                count=make("trained count", 1),
                ranges=make("trained ranges", slots, 2),
                total=total,
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
        """Everything that `upload` fills, the tables, and the loss total."""
        loss = self.loss
        tensors = [loss.rows, loss.targets, loss.weight, loss.count, loss.ranges, loss.total]
        tensors += [self.draws] if self.draws else []
        return self.placed() | self.tables.storages() | {t.storage for t in tensors}

    def upload(self, device: Device, segments: Sequence[Segment]) -> int:
        """Lays segments side by side, ordered by slot, and uploads them; returns the trained tokens.

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
        slot_ranges, loss_ranges = np.zeros((slots, 2), np.uint32), np.zeros((slots, 2), np.uint32)
        rows, targets, weights = [], [], []
        at = trained = 0
        for segment in sorted(segments, key=lambda s: slots if s.slot is None else s.slot):
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
                weights.append(np.full(picked.size, segment.weight))
            if segment.slot is not None:
                slot_ranges[segment.slot] = (
                    at if slot_ranges[segment.slot, 1] == 0 else slot_ranges[segment.slot, 0],
                    stop,
                )
                begin = trained if loss_ranges[segment.slot, 1] == 0 else loss_ranges[segment.slot, 0]
                loss_ranges[segment.slot] = (begin, trained + picked.size)
            at, trained = stop, trained + picked.size
        write(device, self.ids, ids)
        self.place(device, Rows(positions, numbers, row, first, last))
        write(device, self.slot_ranges, slot_ranges)
        if self.draws:
            write(device, self.draws, draws)
        write(device, self.loss.rows, _padded(rows, size, NOWHERE))
        write(device, self.loss.targets, _padded(targets, size, 0))
        write(device, self.loss.weight, _padded(weights, size, 0.0))
        write(device, self.loss.count, np.array([trained]))
        write(device, self.loss.ranges, loss_ranges)
        return trained

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
