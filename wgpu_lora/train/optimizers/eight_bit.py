"""State in 8-bit codes, as in bitsandbytes: blocks of 256 values share a scale, their largest magnitude.

What is kept of a block of 1024 parameters is a record: `codes` of every state after each other, u8 [states, 1024], and
their scales among `values`, f32 [states, 4]. The record of a matrix of fewer than 4,096 values is wide: it has no
codes, and its values are the states, f32 [states, 1024]. A page's `places` u32 [blocks, 4] has (owner, first word of
codes, first value, NARROW, WIDE or UNKEPT) of each block. What is not trained has no record; its gradient is zeroed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from wgpu_lora.gpu import reference_values
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.reference_values import Part, evenly_spaced, select_rows
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.gpu.tiling import Arrays, Constants
from wgpu_lora.models.parameters import PageRegion, ParameterSet
from wgpu_lora.ops.gradient_norm import BLOCK, NO_OWNER
from wgpu_lora.train.optimizers.update_rule import (
    ANOTHER,
    QUANT_BLOCK,
    Moved,
    State,
    apply_update,
    find_diverged,
    laid_out,
    wrong_values,
)

NARROW, WIDE, UNKEPT = range(3)
LEAST_VALUES = 4096  # of a matrix whose state is held in codes
QUARTERS = BLOCK // QUANT_BLOCK
SMALLEST = 1e-38  # a scale that codes are divided by
SIGNED = (True, False)  # whether the codes of the first and of the second state have a sign


def record_values(states: int, wide: bool) -> int:
    """Floats of a record."""
    return states * (BLOCK if wide else QUARTERS)


def code_words(states: int) -> int:
    """Words of a record's codes, if it has any."""
    return states * BLOCK // 4


def unpacked(codes: Any, values: Any, places: Any, states: int) -> list[np.ndarray]:
    """The states by parameter: float64 [blocks * 1024] each; zero where nothing is kept."""
    result = [np.zeros((len(places), BLOCK)) for _ in range(states)]
    for block, (owner, word, value, wide) in enumerate(places.astype(np.int64)):
        if owner == NO_OWNER or wide == UNKEPT:
            continue
        for at, state in enumerate(result):
            if wide:
                state[block] = values[value + at * BLOCK :][:BLOCK]
                continue
            scales = np.repeat(values[value + at * QUARTERS :][:QUARTERS], QUANT_BLOCK)
            state[block] = dynamic_map(SIGNED[at])[codes[4 * word + at * BLOCK :][:BLOCK]] * scales
    return [state.reshape(-1) for state in result]


def packed(states: Sequence[Any], go: Any, codes: Any, values: Any, places: Any) -> tuple[Any, Any]:
    """(codes, values) with the new states of the blocks that are updated."""
    codes, values = codes.copy(), values.astype(np.float64)
    for block, (owner, word, value, wide) in enumerate(places.astype(np.int64)):
        if owner == NO_OWNER or wide == UNKEPT or not go[block]:
            continue
        for at, state in enumerate(states):
            block_state = state.reshape(-1, BLOCK)[block]
            if wide:
                values[value + at * BLOCK :][:BLOCK] = block_state
                continue
            scales = np.abs(block_state).reshape(QUARTERS, QUANT_BLOCK).max(axis=1)
            values[value + at * QUARTERS :][:QUARTERS] = scales
            relative = block_state / np.maximum(np.repeat(scales, QUANT_BLOCK), SMALLEST)
            codes[4 * word + at * BLOCK :][:BLOCK] = nearest_codes(relative, SIGNED[at])
    return codes, values


def updated_8bit(
    moved: Moved, record: type, states: int, params: Any, grads: Any, codes: Any, values: Any, places: Any, *rest: Any
) -> tuple[Any, ...]:
    """The reference of an update. rest: hyper, report."""
    hyper, report = rest
    places = places.reshape(-1, 4)
    old, owners = unpacked(codes, values, places, states), places[:, 0]
    before, has_state = params, np.repeat(places[:, 3] != UNKEPT, BLOCK)
    params, zeroed, *new = apply_update(moved, record, params, grads, old, owners, hyper, report)
    params = np.where(has_state, params, before)
    fine = report.reshape(-1, 4)[:, 2] != 0
    go = fine[np.where(owners == NO_OWNER, 0, owners // 2)]
    return params, zeroed, *packed(new, go, codes, values, places)


def diverging_8bit(
    moved: Moved, record: type, states: int, params: Any, grads: Any, codes: Any, values: Any, places: Any, *rest: Any
) -> np.ndarray:
    """The reference of a check. rest: hyper, report."""
    places = places.reshape(-1, 4)
    old, owners = unpacked(codes, values, places, states), np.where(places[:, 3] == UNKEPT, NO_OWNER, places[:, 0])
    return find_diverged(moved, record, params, grads, old, owners, *rest)


def some_records(arrays: Arrays, c: Constants) -> Part | None:
    """The part to check of a kernel over a page with records: some of its blocks."""
    count, states = c["blocks"], len(c["states"].split())
    if count <= reference_values.PAGE_BLOCKS:
        return None
    blocks = evenly_spaced(count, reference_values.PAGE_BLOCKS)
    places = arrays["places"].reshape(-1, 4)[blocks].astype(np.int64)
    codes, values, moved = [np.zeros(4, np.uint8)], [np.zeros(1, np.float32)], places.copy()
    word, value = 1, 1
    for at, (owner, first_word, first_value, wide) in enumerate(places):
        if owner == NO_OWNER or wide == UNKEPT:
            continue
        moved[at, 1:3] = word, value
        if not wide:
            codes.append(arrays["codes"][4 * first_word :][: states * BLOCK])
            word += code_words(states)
        values.append(arrays["values"][first_value:][: record_values(states, bool(wide))])
        value += values[-1].size
    part = select_rows(arrays, "params grads diverged", count, blocks)
    part |= {"codes": np.concatenate(codes), "values": np.concatenate(values)}
    return {**part, "places": moved.astype(np.uint32)}, {**c, "blocks": blocks.size}


ABSMAX = "_absmax"  # after the name of a state: the scales of its codes, as bitsandbytes calls them


@dataclass(frozen=True)
class Record:
    """The records of an array's blocks, which follow each other: the first byte of codes, and the first value."""

    name: str
    region: PageRegion
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
            for region in trained.regions(slot).values():
                first = region.first // BLOCK
                small = math.prod(region.stored_shape) < LEAST_VALUES
                kinds[region.page][first : first + region.blocks] = WIDE if small else NARROW
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
        for name, region in self.trained.regions(slot).items():
            _, word, value, kind = self._places[region.page][region.first // BLOCK].tolist()
            yield Record(name, region, 4 * word, value, kind == WIDE)

    def initialise(self, device: Device) -> None:
        for places, (*_, tensor) in zip(self._places, self.pages, strict=True):
            device.write(tensor.storage.buffer, places)

    def read(self, device: Device, slot: int) -> Arrays:
        codes = [device.read(page[0].storage.buffer).view(np.uint8) for page in self.pages]
        values = [device.read(page[1].storage.buffer).view(np.float32) for page in self.pages]
        result: Arrays = {}
        for record in self._records(slot):
            region, count = record.region, len(self.states)
            size = region.blocks * record_values(count, record.wide)
            numbers = values[region.page][record.value : record.value + size].reshape(region.blocks, count, -1)
            whole: np.ndarray = numbers
            if not record.wide:
                whole = codes[region.page][record.code : record.code + region.blocks * count * BLOCK]
                whole = whole.reshape(region.blocks, count, BLOCK)
            for at, state in enumerate(self.states):
                name = f"{record.name}.{state.name}"
                result[name] = replace(region, first=0).cropped(whole[:, at].reshape(-1))
                if not record.wide:
                    result[name + ABSMAX] = numbers[:, at].reshape(-1).copy()
        return result

    def fault(self, slot: int, arrays: Mapping[str, np.ndarray]) -> str | None:
        expected: dict[str, tuple[type, tuple[int, ...], float | None]] = {}
        for record in self._records(slot):
            for state in self.states:
                name, shape = f"{record.name}.{state.name}", record.region.stored_shape
                expected[name] = (np.float32, shape, state.minimum) if record.wide else (np.uint8, shape, None)
                if not record.wide:
                    expected[name + ABSMAX] = np.float32, (QUARTERS * record.region.blocks,), 0.0
        if set(arrays) != set(expected):
            return ANOTHER
        for name, (dtype, sizes, minimum) in expected.items():
            if wrong := wrong_values(name, arrays[name], dtype, sizes, minimum):
                return wrong
        return None

    def write(self, device: Device, slot: int, arrays: Mapping[str, np.ndarray]) -> None:
        for record in self._records(slot):
            region, count = record.region, len(self.states)
            codes = np.zeros((region.blocks, count, BLOCK), np.uint8)
            values = np.zeros((region.blocks, count, record_values(1, record.wide)), np.float32)
            for at, state in enumerate(self.states):
                name = f"{record.name}.{state.name}"
                if name not in arrays:
                    continue
                zero = 0 if record.wide else zero_code(SIGNED[at])
                whole = laid_out(region, arrays[name], zero).reshape(-1)
                padding = np.full(region.blocks * BLOCK - whole.size, zero, whole.dtype)
                (values if record.wide else codes)[:, at] = np.concatenate([whole, padding]).reshape(-1, BLOCK)
                if not record.wide:
                    values[:, at] = arrays[name + ABSMAX].reshape(-1, QUARTERS)
            code_page, value_page, _ = self.pages[region.page]
            device.write(value_page.storage.buffer, values, 4 * record.value)
            if not record.wide:
                device.write(code_page.storage.buffer, codes, record.code)

    def fill(self, device: Device, rng: np.random.Generator) -> None:
        for codes, values, _ in self.pages:
            device.write(codes.storage.buffer, rng.integers(0, 256, codes.shape, np.uint8))
            device.write(values.storage.buffer, rng.random(values.shape, np.float32))


DECADES = 7


@cache
def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 values of the codes, ascending, from -1 or 0 to 1: float64 [256] of float32 values."""
    result = [0.0, 1.0]
    for decade in range(DECADES):
        edges = np.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        middles = 10.0 ** (decade - DECADES + 1) * (edges[:-1] + edges[1:]) / 2
        result += [*middles, *(-middles if signed else ())]
    values: np.ndarray = np.sort(np.array(result)).astype(np.float32).astype(np.float64)
    values.flags.writeable = False
    return values


def nearest_codes(values: np.ndarray, signed: bool) -> np.ndarray:
    """The codes of the nearest values of the map: uint8, of the same shape."""
    table = dynamic_map(signed)
    return np.searchsorted((table[1:] + table[:-1]) / 2, values, "left").astype(np.uint8)


def zero_code(signed: bool) -> int:
    return int(np.flatnonzero(dynamic_map(signed) == 0)[0])
