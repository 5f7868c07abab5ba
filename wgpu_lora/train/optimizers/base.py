"""The interface of optimizers; what they share is in train/optimizer.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import ITEM_BYTES, Tensor
from wgpu_lora.ops.optimizer import BLOCK


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps between steps, zero at first: `values` of `dtype` per BLOCK parameters.

    least: the smallest value that is valid in a checkpoint.
    """

    name: str
    dtype: str = "f32"
    values: int = BLOCK
    least: float | None = None

    def __post_init__(self) -> None:
        assert self.block_bytes % 4 == 0, "a slot's part must begin at a whole word"

    @property
    def by_parameter(self) -> bool:
        """Whether there is one float per parameter; checkpoints then store it in the matrix's shape."""
        return self.dtype == "f32" and self.values == BLOCK

    @property
    def block_bytes(self) -> int:
        return self.values * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_parameter(self) -> float:
        return self.block_bytes / BLOCK


@dataclass(frozen=True)
class Page:
    """A page of all slots' parameters, `blocks` of BLOCK values, and the tensors of its update.

    state: in the order of the rule's. block_slots u32 [blocks]: the slot of each block, or NO_SLOT.
    hyper: a Hyper per slot. report f32 [slots, 4]: (norm, clipping factor, 1 if the slot may be updated, loss).
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
        """The number of values."""
        return self.blocks * BLOCK

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order in which kernels usually bind them."""
        return (self.params, self.grads, *self.state, self.block_slots, self.hyper, self.report)


class UpdateRule(Protocol):
    """An update rule: a frozen dataclass whose fields are the training options that it reads, and its own
    (`own_option`).

    Hyper: the struct that its kernels read for each slot, a dataclass of F32 fields (see gpu.struct).
    """

    state: ClassVar[tuple[State, ...]]
    Hyper: ClassVar[type]

    def hyper(self, step: int, learning_rate: float) -> Any:
        """A slot's Hyper for its 1-based `step`."""

    @staticmethod
    def record_check(program: Program, page: Page, diverged: Tensor) -> None:
        """Record a check that writes 1 into diverged f32 [blocks] if the update would make a parameter of the block
        larger than MAX_PARAMETER or any value non-finite, else 0; only slots that may be updated matter."""

    @staticmethod
    def record_update(program: Program, page: Page) -> None:
        """Record the update of the slots that may be updated; it zeroes the gradients of all slots."""
