"""LoRA's second product, added by the kernel of a frozen product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.stack import ALL_PARTS


@dataclass(frozen=True)
class LowRank:
    """What is added: h B^T or, backward, dh A, by slot (see `matmul.adapted`).

    h: f32 [T, width], of which the columns [first, first + rank) are used. In a stack's forward product, each adapted
        part uses the next `rank` columns.
    factor: B or A of each slot, `stride` values apart.
    ranges, first_row: as in LoraSlots.
    parts: of a stack's parts, which have an adapter.
    """

    h: Tensor
    factor: Tensor
    stride: int
    ranges: Tensor
    rank: int
    first: int = 0
    first_row: int = 0
    parts: str = ALL_PARTS


def tensors_of(low: LowRank | None) -> tuple[Tensor, ...]:
    """The bindings h, factor and ranges."""
    return (low.h, low.factor, low.ranges) if low else ()


def columns_of(low: LowRank | None) -> dict[str, Any]:
    """The constants of a forward product."""
    return {**steps_of(low), "adapted_parts": low.parts} if low else {}


def steps_of(low: LowRank | None) -> dict[str, Any]:
    """The constants of a backward product."""
    if low is None:
        return {}
    shape = {"rank": low.rank, "h_skip": low.h.shape[1] - low.rank, "h_first": low.first, "stride": low.stride}
    return {**shape, "first_row": low.first_row}
