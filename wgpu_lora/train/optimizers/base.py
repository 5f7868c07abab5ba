"""What an optimizer has to say of itself; what all of them share is in train/optimizer.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import ITEM_BYTES, Tensor
from wgpu_lora.ops.optimizer import BLOCK


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps from step to step, zero at first: `values` of `dtype` for each BLOCK parameters.

    least: the smallest value that a checkpoint may have of it.
    """

    name: str
    dtype: str = "f32"
    values: int = BLOCK
    least: float | None = None

    def __post_init__(self) -> None:
        assert self.block_bytes % 4 == 0, "a slot's part of it begins at a whole word"

    @property
    def by_parameter(self) -> bool:
        """Whether it has a float for each parameter: a checkpoint then has it in the shape of the matrix."""
        return self.dtype == "f32" and self.values == BLOCK

    @property
    def block_bytes(self) -> int:
        return self.values * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_parameter(self) -> float:
        return self.block_bytes / BLOCK


@dataclass(frozen=True)
class Page:
    """A page of all slots' parameters, `blocks` of BLOCK values, and what their update reads and writes.

    state: in the order of the rule's. block_slots u32 [blocks]: whose each block is, NO_SLOT where nobody's.
    hyper: a Hyper for each slot. report f32 [slots, 4]: (norm, factor that clips the gradient, 1 where the slot may be
    updated, loss).
    """

    blocks: int
    params: Tensor
    grads: Tensor
    state: tuple[Tensor, ...]
    block_slots: Tensor
    hyper: Tensor
    report: Tensor

    @property
    def size(self) -> int:
        """How many values it has."""
        return self.blocks * BLOCK

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it, in the order in which kernels usually bind it."""
        return (self.params, self.grads, *self.state, self.block_slots, self.hyper, self.report)


class UpdateRule(Protocol):
    """How parameters follow from gradients: a frozen dataclass, whose fields are the training options that it reads.

    Hyper: the struct that its kernels read of each slot, a dataclass of F32 fields (see gpu.struct).
    """

    state: ClassVar[tuple[State, ...]]
    Hyper: ClassVar[type]

    def hyper(self, step: int, learning_rate: float) -> Any:
        """A slot's Hyper in its 1-based `step`."""

    @staticmethod
    def record_check(program: Program, page: Page, diverged: Tensor) -> None:
        """Records what writes 1 into diverged f32 [blocks] where the update would leave a parameter of a block beyond
        MAX_PARAMETER, or anything that is not finite; else 0. Slots that may not be updated are not looked at."""

    @staticmethod
    def record_update(program: Program, page: Page) -> None:
        """Records the update of the slots that may be updated. It zeroes the gradients of all slots."""
