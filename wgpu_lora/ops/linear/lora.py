"""The adapters of a linear layer as ops see them: factors by slot, and which of the batch's rows are whose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.matmul.matrix_stack import ALL_PARTS


@dataclass(frozen=True)
class Factors:
    """A matrix of each slot, `stride` values apart, and their gradients alike: f32, flat.

    Each slot's matrix is padded to whole blocks of the optimizer, and smaller ranks with zeros, which stay zero.
    """

    params: Tensor
    grads: Tensor
    stride: int


@dataclass(frozen=True, eq=False)
class LoraStack:
    """The adapters of `size` modules that read the same x, or of one.

    a: of each slot, the A [rank, in] of all modules, one after another: [size * rank, in]. b: the B [out, rank] of each
    module, at whole blocks of the optimizer. scale: f32 [slots, size * rank], of each of h's columns.
    """

    a: Factors
    b: Factors
    scale: Tensor
    size: int


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """DoRA's magnitudes of a module by slot (see `ops.linear.dora`).

    m: parameters [out] of each slot. gain, norm: f32 [slots, out padded to an aligned size], m / norm and the norm of
    the weight's rows; 1 and 0 for a slot without DoRA.
    """

    m: Factors
    gain: Tensor
    norm: Tensor


@dataclass(frozen=True)
class LoraSlots:
    """The adapters of one module by slot, and the batch's rows of each slot.

    a: A [rank, in]; b: B [out, rank]. stack, index: the stack, and which of its modules this is.
    ranges: u32 [slots, 2], the rows [start, stop) of each slot in the batch.
    dropout_keys: u32 [T, 4], dropout keys (see `dropout_apply`); None without dropout.
    module: number of the module, also a dropout key.
    first_row: index in the batch of row 0 of x.
    magnitudes: None if no slot has DoRA here.
    offset: frozen adapters added to the base's weight, without dropout; None if no slot has one here.
    """

    a: Factors
    b: Factors
    stack: LoraStack
    index: int
    ranges: Tensor
    dropout_keys: Tensor | None
    module: int
    rank: int
    slots: int
    first_row: int = 0
    magnitudes: Magnitudes | None = None
    offset: LoraSlots | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a LoRA and nothing else."""
        return not (self.magnitudes or self.offset)

    @property
    def width(self) -> int:
        """The columns of h: those of all modules of the stack."""
        return self.stack.scale.shape[1]

    def block(self, start: int, stop: int) -> LoraSlots:
        """The same adapters for a block of rows [start, stop) of x."""
        draws = self.dropout_keys.rows(start, stop) if self.dropout_keys else None
        return replace(self, dropout_keys=draws, first_row=start, offset=self.offset and self.offset.block(start, stop))

    def without_dropout(self) -> LoraSlots:
        return replace(self, dropout_keys=None)

    def whole(self) -> LoraSlots:
        """All modules of the stack as one, with the rank of all together."""
        return replace(self, a=self.stack.a, b=self.stack.b, index=0, rank=self.width)

    def factor_constants(self, factors: Factors) -> dict[str, int]:
        """Constants of kernels that read or write a factor."""
        return {"slots": self.slots, "stride": factors.stride, "first_row": self.first_row}

    def columns(self, operand: str) -> dict[str, int]:
        """The module's columns of h, as the constants of an operand a, b or y."""
        return {f"{operand}_skip": self.width - self.rank, f"{operand}_first": self.index * self.rank}

    def low_rank(self, h: Tensor, factors: Factors, parts: str = ALL_PARTS) -> LowRank:
        """LoRA's second product with h, which frozen products add."""
        first = self.index * self.rank
        return LowRank(h, factors.params, factors.stride, self.ranges, self.rank, first, self.first_row, parts)


@dataclass(frozen=True)
class LowRank:
    """The added product: h B^T or, backward, dh A, by slot (see `matmul.adapted`).

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


def tensors_of(low_rank: LowRank | None) -> tuple[Tensor, ...]:
    """The bindings h, factor and ranges."""
    return (low_rank.h, low_rank.factor, low_rank.ranges) if low_rank else ()


def forward_constants(low_rank: LowRank | None) -> dict[str, Any]:
    """The constants of a forward product."""
    return {**backward_constants(low_rank), "adapted_parts": low_rank.parts} if low_rank else {}


def backward_constants(low_rank: LowRank | None) -> dict[str, Any]:
    """The constants of a backward product."""
    if low_rank is None:
        return {}
    shape = {
        "rank": low_rank.rank,
        "h_skip": low_rank.h.shape[1] - low_rank.rank,
        "h_first": low_rank.first,
        "stride": low_rank.stride,
    }
    return {**shape, "first_row": low_rank.first_row}
