"""A state in 8-bit codes on the device and in checkpoints; its layout is that of train/optimizers/eight_bit.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.gpu.tunable import Arrays
from wgpu_lora.models.parameters import ParameterSet, Place
from wgpu_lora.ops.optimizer import BLOCK
from wgpu_lora.train.optimizers.base import State
from wgpu_lora.train.optimizers.dynamic_map import zero_code
from wgpu_lora.train.optimizers.eight_bit import (
    LEAST_VALUES,
    NARROW,
    QUARTERS,
    SIGNED,
    UNKEPT,
    WIDE,
    code_words,
    record_values,
)
from wgpu_lora.train.optimizers.state import ANOTHER, laid_out, wrong_values

ABSMAX = "_absmax"  # after the name of a state: the scales of its codes, as bitsandbytes calls them


@dataclass(frozen=True)
class Record:
    """The records of an array's blocks, which follow each other: the first byte of codes, and the first value."""

    name: str
    place: Place
    code: int
    value: int
    wide: bool


class EightBit:
    """Codes, values and places of each page. An array of fewer than LEAST_VALUES at the slot's own rank is held in f32,
    as in bitsandbytes.

    In checkpoints, codes have their array's shape, with their scales, f32 [blocks * 4], in a tensor beside them; what
    is held in f32 is stored as `Plain` has it.
    """

    def __init__(self, trained: ParameterSet, states: Sequence[State]):
        self.trained, self.states = trained, states
        kinds = [np.full(owners.size, UNKEPT) for owners in trained.block_owners]
        for slot in range(trained.slots):
            for place in trained.places(slot).values():
                first = place.first // BLOCK
                small = math.prod(place.own) < LEAST_VALUES
                kinds[place.page][first : first + place.blocks] = WIDE if small else NARROW
        self._places: list[np.ndarray] = []
        self.pages: list[tuple[Tensor, ...]] = []
        for i, (owners, kind) in enumerate(zip(trained.block_owners, kinds, strict=True)):
            words = np.where(kind == NARROW, code_words(len(states)), 0)
            values = np.select([kind == NARROW, kind == WIDE], [record_values(len(states), w) for w in (False, True)])
            places = np.stack([owners, np.cumsum(words) - words, np.cumsum(values) - values, kind], axis=1)
            self._places.append(places.astype(np.uint32))
            self.pages.append(
                (
                    persistent((max(4, 4 * int(words.sum())),), "u8", "optimizer", f"codes {i}"),
                    persistent((max(1, int(values.sum())),), "f32", "optimizer", f"values {i}"),
                    persistent(places.shape, "u32", "optimizer", f"places {i}"),
                )
            )

    def _records(self, slot: int) -> Iterator[Record]:
        for name, place in self.trained.places(slot).items():
            _, word, value, kind = self._places[place.page][place.first // BLOCK].tolist()
            yield Record(name, place, 4 * word, value, kind == WIDE)

    def initialise(self, device: Device) -> None:
        for places, (*_, tensor) in zip(self._places, self.pages, strict=True):
            device.write(tensor.storage.buffer, places)

    def read(self, device: Device, slot: int) -> Arrays:
        codes = [device.read(page[0].storage.buffer).view(np.uint8) for page in self.pages]
        values = [device.read(page[1].storage.buffer).view(np.float32) for page in self.pages]
        found: Arrays = {}
        for record in self._records(slot):
            place, count = record.place, len(self.states)
            size = place.blocks * record_values(count, record.wide)
            own = values[place.page][record.value : record.value + size].reshape(place.blocks, count, -1)
            whole: np.ndarray = own
            if not record.wide:
                whole = codes[place.page][record.code : record.code + place.blocks * count * BLOCK]
                whole = whole.reshape(place.blocks, count, BLOCK)
            for at, state in enumerate(self.states):
                name = f"{record.name}.{state.name}"
                found[name] = replace(place, first=0).cropped(whole[:, at].reshape(-1))
                if not record.wide:
                    found[name + ABSMAX] = own[:, at].reshape(-1).copy()
        return found

    def fault(self, slot: int, stored: Mapping[str, np.ndarray]) -> str | None:
        expected: dict[str, tuple[type, tuple[int, ...], float | None]] = {}
        for record in self._records(slot):
            for state in self.states:
                name, shape = f"{record.name}.{state.name}", record.place.own
                expected[name] = (np.float32, shape, state.least) if record.wide else (np.uint8, shape, None)
                if not record.wide:
                    expected[name + ABSMAX] = np.float32, (QUARTERS * record.place.blocks,), 0.0
        if set(stored) != set(expected):
            return ANOTHER
        for name, (dtype, sizes, least) in expected.items():
            if wrong := wrong_values(name, stored[name], dtype, sizes, least):
                return wrong
        return None

    def write(self, device: Device, slot: int, stored: Mapping[str, np.ndarray]) -> None:
        for record in self._records(slot):
            place, count = record.place, len(self.states)
            codes = np.zeros((place.blocks, count, BLOCK), np.uint8)
            values = np.zeros((place.blocks, count, record_values(1, record.wide)), np.float32)
            for at, state in enumerate(self.states):
                name = f"{record.name}.{state.name}"
                if name not in stored:
                    continue
                zero = 0 if record.wide else zero_code(SIGNED[at])
                whole = laid_out(place, stored[name], zero).reshape(-1)
                rest = np.full(place.blocks * BLOCK - whole.size, zero, whole.dtype)
                (values if record.wide else codes)[:, at] = np.concatenate([whole, rest]).reshape(-1, BLOCK)
                if not record.wide:
                    values[:, at] = stored[name + ABSMAX].reshape(-1, QUARTERS)
            code_page, value_page, _ = self.pages[place.page]
            device.write(value_page.storage.buffer, values, 4 * record.value)
            if not record.wide:
                device.write(code_page.storage.buffer, codes, record.code)

    def fill(self, device: Device, rng: np.random.Generator) -> None:
        for codes, values, _ in self.pages:
            device.write(codes.storage.buffer, rng.integers(0, 256, codes.shape, np.uint8))
            device.write(values.storage.buffer, rng.random(values.shape, np.float32))
