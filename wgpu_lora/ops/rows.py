"""Tilings and grids of kernels that assign a subgroup, or a thread, to each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wgpu_lora.gpu.kernel import Grid, one_per
from wgpu_lora.gpu.tiling import Capabilities, Tiling


def by_subgroup(capabilities: Capabilities, c: Any) -> list[Tiling]:
    """One subgroup per row if the device has subgroups; one thread per row."""
    size = capabilities.subgroup_size
    return [Tiling("broadcast", size), Tiling()] if size >= 4 else [Tiling()]


def row_grid(rows: Callable[[Any], int]) -> Callable[[Any], Grid]:
    return lambda c: one_per(rows(c), 1 if c.tile.subgroup else c.tile.lanes)
