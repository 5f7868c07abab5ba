"""What the kernels that work row by row share: a subgroup, or one thread, for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wgpu_lora.gpu.kernel import Grid, Tiles, Traits, one_per


def by_subgroup(traits: Traits, c: Any) -> list[Tiles]:
    """One subgroup a row where the device has subgroups, and one thread a row everywhere."""
    plain: Tiles = {"sg": 0}
    return [{"sg": traits.subgroup_size}, plain] if traits.subgroup_size >= 4 else [plain]


def row_grid(rows: Callable[[Any], int]) -> Callable[[Any], Grid]:
    return lambda c: one_per(rows(c), 1 if c.sg else 64)
