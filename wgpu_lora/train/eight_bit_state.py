"""A state in 8-bit codes on the device and in checkpoints; its layout is that of train/optimizers/eight_bit.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wgpu_lora.formats.peft import Matrices
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.models.lora import AdapterSet
from wgpu_lora.ops.optimizer import BLOCK, NO_OWNER
from wgpu_lora.train.optimizer_state import ANOTHER, Arrays, Placed, padded, placed, wrong_values
from wgpu_lora.train.optimizers.base import State
from wgpu_lora.train.optimizers.dynamic_map import zero_code
from wgpu_lora.train.optimizers.eight_bit import LEAST_VALUES, QUARTERS, SIGNED, code_words, record_values

ABSMAX = "_absmax"  # after the name of a state: the scales of its codes, as bitsandbytes calls them


@dataclass(frozen=True)
class Record:
    """The records of a matrix's blocks, which follow each other: the first byte of codes, and the first value."""

    matrix: Placed
    code: int
    value: int
    wide: bool


class EightBit:
    """Codes, values and places of each page. A matrix of fewer than LEAST_VALUES at the slot's own rank is held in f32,
    as in bitsandbytes.

    In checkpoints, codes have their matrix's shape at the slot's own rank, with their scales, f32 [blocks * 4], in a
    tensor beside them; what is held in f32 is stored as `Plain` has it.
    """

    def __init__(self, adapters: AdapterSet, states: Sequence[State]):
        self.adapters, self.states = adapters, states
        self._places = [np.zeros((owners.size, 4), np.uint32) for owners in adapters.block_owners]
        self.pages: list[tuple[Tensor, ...]] = []
        for i, (places, owners) in enumerate(zip(self._places, adapters.block_owners, strict=True)):
            wide, used = self._wide_blocks(i, owners.size), owners != NO_OWNER
            words = np.where(wide | ~used, 0, code_words(len(states)))
            values = np.where(wide, record_values(len(states), True), record_values(len(states), False)) * used
            places[:] = np.stack([owners, np.cumsum(words) - words, np.cumsum(values) - values, wide], axis=1)
            self.pages.append(
                (
                    persistent((max(4, 4 * int(words.sum())),), "u8", "optimizer", f"codes {i}"),
                    persistent((max(1, int(values.sum())),), "f32", "optimizer", f"values {i}"),
                    persistent(places.shape, "u32", "optimizer", f"places {i}"),
                )
            )

    def _wide_blocks(self, page: int, blocks: int) -> np.ndarray:
        """Whether the record of each block of a page is wide."""
        wide = np.zeros(blocks, bool)
        for (_, which), factor in self.adapters.factors.items():
            if factor.page != page:
                continue
            for slot, spec in enumerate(self.adapters.specs):
                first = (factor.offset + slot * factor.stride) // BLOCK
                size = spec.rank * factor.shape[which == "A"]
                wide[first : first + factor.blocks] = size < LEAST_VALUES
        return wide

    def _records(self, slot: int) -> Iterator[Record]:
        for matrix in placed(self.adapters, slot):
            _, word, value, wide = self._places[matrix.factor.page][matrix.first].tolist()
            yield Record(matrix, 4 * word, value, bool(wide))

    def initialise(self, device: Device) -> None:
        for places, (*_, tensor) in zip(self._places, self.pages, strict=True):
            device.write(tensor.storage.buffer, places)

    def read(self, device: Device, slot: int) -> Arrays:
        codes = [device.read(page[0].storage.buffer).view(np.uint8) for page in self.pages]
        values = [device.read(page[1].storage.buffer).view(np.float32) for page in self.pages]
        found: Arrays = {}
        for record in self._records(slot):
            matrix, page, count = record.matrix, record.matrix.factor.page, len(self.states)
            size = matrix.blocks * record_values(count, record.wide)
            own = values[page][record.value : record.value + size].reshape(matrix.blocks, count, -1)
            whole: np.ndarray = own
            if not record.wide:
                whole = codes[page][record.code : record.code + matrix.blocks * count * BLOCK]
                whole = whole.reshape(matrix.blocks, count, BLOCK)
            for at, state in enumerate(self.states):
                (rows, cols), shape, name = matrix.factor.shape, matrix.shape, f"{matrix.name}.{state.name}"
                matrix_values = whole[:, at].reshape(-1)[: rows * cols].reshape(rows, cols)
                found[name] = matrix_values[: shape[0], : shape[1]].copy()
                if not record.wide:
                    found[name + ABSMAX] = own[:, at].reshape(-1).copy()
        return found

    def fault(self, slot: int, matrices: Matrices, stored: Mapping[str, np.ndarray]) -> str | None:
        expected: dict[str, tuple[type, tuple[int, ...], float | None]] = {}
        for record in self._records(slot):
            for state in self.states:
                name, shape = f"{record.matrix.name}.{state.name}", record.matrix.shape
                expected[name] = (np.float32, shape, state.least) if record.wide else (np.uint8, shape, None)
                if not record.wide:
                    expected[name + ABSMAX] = np.float32, (QUARTERS * record.matrix.blocks,), 0.0
        if set(stored) != set(expected):
            return ANOTHER
        for name, (dtype, sizes, least) in expected.items():
            if wrong := wrong_values(name, stored[name], dtype, sizes, least):
                return wrong
        return None

    def write(self, device: Device, slot: int, stored: Mapping[str, np.ndarray]) -> None:
        for record in self._records(slot):
            matrix, count = record.matrix, len(self.states)
            codes = np.zeros((matrix.blocks, count, BLOCK), np.uint8)
            values = np.zeros((matrix.blocks, count, record_values(1, record.wide)), np.float32)
            for at, state in enumerate(self.states):
                name = f"{matrix.name}.{state.name}"
                if name not in stored:
                    continue
                zero = 0 if record.wide else zero_code(SIGNED[at])
                whole = padded(stored[name], matrix.factor.shape, zero).reshape(-1)
                rest = np.full(matrix.blocks * BLOCK - whole.size, zero, whole.dtype)
                (values if record.wide else codes)[:, at] = np.concatenate([whole, rest]).reshape(-1, BLOCK)
                if not record.wide:
                    values[:, at] = stored[name + ABSMAX].reshape(-1, QUARTERS)
            code_page, value_page, _ = self.pages[matrix.factor.page]
            device.write(value_page.storage.buffer, values, 4 * record.value)
            if not record.wide:
                device.write(code_page.storage.buffer, codes, record.code)

    def fill(self, device: Device, rng: np.random.Generator) -> None:
        for codes, values, _ in self.pages:
            device.write(codes.storage.buffer, rng.integers(0, 256, codes.shape, np.uint8))
            device.write(values.storage.buffer, rng.random(values.shape, np.float32))
