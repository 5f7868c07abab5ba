"""Assigns the temporary tensors of a recorded program to arenas, so that its peak memory is known before allocation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from wgpu_lora.gpu.device_errors import BindingTooLarge
from wgpu_lora.gpu.tensor import Storage, align

ENDLESS = np.array([np.iinfo(np.int64).max])


@dataclass
class ArenaPlan:
    """Arena sizes in bytes, and the location of each temporary storage as (arena, byte offset)."""

    sizes: list[int]
    locations: dict[Storage, tuple[int, int]]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


def plan_arenas(lifetimes: dict[Storage, tuple[int, int]], max_arena: int, max_binding: int) -> ArenaPlan:
    """Greedy placement: largest first, each at the lowest offset that is free during its lifetime.

    Args:
        lifetimes: storage -> indices of the first and last dispatch that use it, inclusive.
        max_arena: largest buffer, in bytes.
        max_binding: largest binding, in bytes.

    Raises:
        BindingTooLarge: a tensor is larger than a binding or a buffer may be.
    """
    order = sorted(lifetimes, key=lambda s: (-s.nbytes, lifetimes[s][0]))
    first, last, offset, end, arena = (np.zeros(len(order), np.int64) for _ in range(5))
    sizes: list[int] = []
    locations: dict[Storage, tuple[int, int]] = {}
    for i, storage in enumerate(order):
        size = align(storage.nbytes)
        if size > min(max_arena, max_binding):
            raise BindingTooLarge(storage.name, storage.nbytes, min(max_arena, max_binding))
        start, stop = lifetimes[storage]
        overlapping = (first[:i] <= stop) & (last[:i] >= start)
        number, at = 0, 0
        while True:
            rivals = np.flatnonzero(overlapping & (arena[:i] == number))
            at = _lowest_gap(offset[rivals], end[rivals], size)
            if at + size <= max_arena:
                break
            number += 1
        if number == len(sizes):
            sizes.append(0)
        sizes[number] = max(sizes[number], at + size)
        first[i], last[i], offset[i], end[i], arena[i] = start, stop, at, at + size, number
        locations[storage] = (number, at)
    return ArenaPlan(sizes, locations)


def _lowest_gap(offsets: np.ndarray, ends: np.ndarray, size: int) -> int:
    order = np.argsort(offsets, kind="stable")
    reach = np.concatenate([[0], np.maximum.accumulate(ends[order])])
    gaps = np.concatenate([offsets[order], ENDLESS]) - reach
    return int(reach[np.flatnonzero(gaps >= size)[0]])


def total_by_group(storages: Iterable[Storage]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for storage in storages:
        totals[storage.group] = totals.get(storage.group, 0) + storage.nbytes
    return totals
