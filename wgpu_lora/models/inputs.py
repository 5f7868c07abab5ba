"""What a step uploads: token ids and where each row of the batch belongs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wgpu_lora.gpu.tensor import NUMPY, Storage, Tensor, persistent
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.rope import attention_factor, inv_freq
from wgpu_lora.ops.loss import Targets

if TYPE_CHECKING:
    from wgpu_lora.gpu.device import Device

NOWHERE = 0xFFFFFFFF


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


def rope_table(config: ModelConfig, positions: int) -> np.ndarray:
    """cos and sin [positions, head_dim / 2, 2] f32, angles in float64 of f32 frequencies, as torch rounds them."""
    angles = np.arange(positions)[:, None] * inv_freq(config).astype(np.float32).astype(np.float64)[None]
    return (np.stack([np.cos(angles), np.sin(angles)], axis=2) * attention_factor(config)).astype(np.float32)


@dataclass
class StepInputs:
    """The tensors of one step of T rows. `rope_table` is shared between steps of different T.

    ranges: attention window -> u32 [T, 4] (see ops.attention). slot_ranges u32 [slots, 2].
    """

    ids: Tensor
    positions: Tensor
    ranges: dict[int | None, Tensor]
    slot_ranges: Tensor
    draws: Tensor | None
    targets: Targets
    rope_table: Tensor

    @classmethod
    def declare(cls, config: ModelConfig, tokens: int, slots: int, table: Tensor, dropout: bool = False) -> StepInputs:
        def make(name: str, *shape: int, dtype: str = "u32") -> Tensor:
            return persistent(shape, dtype, "workspace", f"{name} [{tokens}]")

        windows: Iterable[int | None] = sorted(set(config.sliding_windows), key=lambda w: w or 0)
        return cls(
            ids=make("ids", tokens),
            positions=make("positions", tokens),
            ranges={w: make(f"ranges {w}", tokens, 4) for w in windows},
            slot_ranges=make("slot ranges", slots, 2),
            draws=make("draws", tokens, 4) if dropout else None,
            targets=Targets(
                rows=make("target rows", tokens), ids=make("targets", tokens), count=make("target count", 1)
            ),
            rope_table=table,
        )

    @property
    def tokens(self) -> int:
        return self.ids.size

    def storages(self) -> set[Storage]:
        """Everything that `upload` fills, and the rope table."""
        targets = self.targets
        tensors = [self.ids, self.positions, *self.ranges.values(), self.slot_ranges, self.rope_table]
        tensors += [targets.rows, targets.ids, targets.count, *([self.draws] if self.draws else [])]
        return {t.storage for t in tensors}

    def upload(self, device: Device, segments: Sequence[Segment]) -> np.ndarray:
        """Lays segments side by side, ordered by slot, and uploads them; returns [start, stop) of each one's targets.

        A token's successor is predicted only within its own segment; what is left of the batch is padding, each
        row of which sees itself alone.
        """
        size = self.tokens
        ids, positions = np.zeros(size, np.uint32), np.zeros(size, np.uint32)
        start, end = np.arange(size, dtype=np.int64), np.arange(1, size + 1, dtype=np.int64)
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
            start[at:stop], end[at:stop] = at, stop
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
        self._write(device, self.ids, ids)
        self._write(device, self.positions, positions)
        row = np.arange(size)
        for window, tensor in self.ranges.items():
            first = start if window is None else np.maximum(start, row - window + 1)
            last = end if window is None else np.minimum(end, row + window)
            self._write(device, tensor, np.stack([first, row + 1, last, row * 0], axis=1))
        self._write(device, self.slot_ranges, slot_ranges)
        if self.draws:
            self._write(device, self.draws, draws)
        self._write(device, self.targets.rows, _padded(rows, size, NOWHERE))
        self._write(device, self.targets.ids, _padded(targets, size, 0))
        self._write(device, self.targets.count, np.array([count]))
        return places

    def _write(self, device: Device, tensor: Tensor, values: np.ndarray) -> None:
        device.write(tensor.storage.buffer, values.astype(NUMPY[tensor.dtype]))


def _padded(parts: list[np.ndarray], size: int, filler: float) -> np.ndarray:
    joined = np.concatenate([*parts, np.zeros(0)])
    return np.concatenate([joined, np.full(size - joined.size, filler)])
