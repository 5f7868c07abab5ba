"""State in 8-bit codes, as in bitsandbytes: blocks of 256 values share a scale, their largest magnitude.

What is kept of a block of 1024 parameters is a record: `codes` of every state after each other, u8 [states, 1024], and
their scales among `values`, f32 [states, 4]. The record of a matrix of fewer than 4,096 values is wide: it has no
codes, and its values are the states, f32 [states, 1024]. A page's `places` u32 [blocks, 4] has (owner, first word of
codes, first value, NARROW, WIDE or UNKEPT) of each block. What is not trained has no record; its gradient is zeroed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wgpu_lora.gpu import part
from wgpu_lora.gpu.part import Part, picks, some_rows
from wgpu_lora.gpu.tunable import Arrays, Constants
from wgpu_lora.ops.optimizer import BLOCK, NO_OWNER
from wgpu_lora.train.optimizers.base import QUANT_BLOCK
from wgpu_lora.train.optimizers.dynamic_map import dynamic_map, nearest_codes
from wgpu_lora.train.optimizers.reference import Moved, diverging, updated

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
    found = [np.zeros((len(places), BLOCK)) for _ in range(states)]
    for block, (owner, word, value, wide) in enumerate(places.astype(np.int64)):
        if owner == NO_OWNER or wide == UNKEPT:
            continue
        for at, state in enumerate(found):
            if wide:
                state[block] = values[value + at * BLOCK :][:BLOCK]
                continue
            scales = np.repeat(values[value + at * QUARTERS :][:QUARTERS], QUANT_BLOCK)
            state[block] = dynamic_map(SIGNED[at])[codes[4 * word + at * BLOCK :][:BLOCK]] * scales
    return [state.reshape(-1) for state in found]


def packed(states: Sequence[Any], go: Any, codes: Any, values: Any, places: Any) -> tuple[Any, Any]:
    """(codes, values) with the new states of the blocks that go."""
    codes, values = codes.copy(), values.astype(np.float64)
    for block, (owner, word, value, wide) in enumerate(places.astype(np.int64)):
        if owner == NO_OWNER or wide == UNKEPT or not go[block]:
            continue
        for at, state in enumerate(states):
            own = state.reshape(-1, BLOCK)[block]
            if wide:
                values[value + at * BLOCK :][:BLOCK] = own
                continue
            scales = np.abs(own).reshape(QUARTERS, QUANT_BLOCK).max(axis=1)
            values[value + at * QUARTERS :][:QUARTERS] = scales
            relative = own / np.maximum(np.repeat(scales, QUANT_BLOCK), SMALLEST)
            codes[4 * word + at * BLOCK :][:BLOCK] = nearest_codes(relative, SIGNED[at])
    return codes, values


def updated_8bit(
    moved: Moved, record: type, states: int, params: Any, grads: Any, codes: Any, values: Any, places: Any, *rest: Any
) -> tuple[Any, ...]:
    """The reference of an update. rest: hyper, report."""
    hyper, report = rest
    places = places.reshape(-1, 4)
    old, owners = unpacked(codes, values, places, states), places[:, 0]
    before, kept = params, np.repeat(places[:, 3] != UNKEPT, BLOCK)
    params, zeroed, *new = updated(moved, record, params, grads, old, owners, hyper, report)
    params = np.where(kept, params, before)
    fine = report.reshape(-1, 4)[:, 2] != 0
    go = fine[np.where(owners == NO_OWNER, 0, owners // 2)]
    return params, zeroed, *packed(new, go, codes, values, places)


def diverging_8bit(
    moved: Moved, record: type, states: int, params: Any, grads: Any, codes: Any, values: Any, places: Any, *rest: Any
) -> np.ndarray:
    """The reference of a check. rest: hyper, report."""
    places = places.reshape(-1, 4)
    old, owners = unpacked(codes, values, places, states), np.where(places[:, 3] == UNKEPT, NO_OWNER, places[:, 0])
    return diverging(moved, record, params, grads, old, owners, *rest)


def some_records(arrays: Arrays, c: Constants) -> Part | None:
    """The part to check of a kernel over a page with records: some of its blocks."""
    count, states = c["blocks"], len(c["states"].split())
    if count <= part.PAGE_BLOCKS:
        return None
    picked = picks(count, part.PAGE_BLOCKS)
    places = arrays["places"].reshape(-1, 4)[picked].astype(np.int64)
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
    kept = some_rows(arrays, "params grads diverged", count, picked)
    kept |= {"codes": np.concatenate(codes), "values": np.concatenate(values)}
    return {**kept, "places": moved.astype(np.uint32)}, {**c, "blocks": picked.size}
