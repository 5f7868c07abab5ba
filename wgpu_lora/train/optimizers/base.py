"""The interface of optimizers; what they share is in train/optimizer.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import ITEM_BYTES, Tensor
from wgpu_lora.ops.optimizer import BLOCK

EIGHT_BIT = "8bit"  # codes of the dynamic map, with a scale per QUANT_BLOCK values (eight_bit.py)
QUANT_BLOCK = 256


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps between steps, zero at first: `values` of `dtype` per BLOCK parameters.

    dtype: of the device's tensors, or EIGHT_BIT. least: the smallest value that is valid in a checkpoint; 8-bit codes
        have no sign if it is 0.
    """

    name: str
    dtype: str = "f32"
    values: int = BLOCK
    least: float | None = None

    def __post_init__(self) -> None:
        assert self.dtype == EIGHT_BIT or self.block_bytes % 4 == 0, "a slot's part must begin at a whole word"

    @property
    def by_parameter(self) -> bool:
        """Whether there is one float per parameter; checkpoints then store it in the matrix's shape."""
        return self.dtype in ("f32", "bf16") and self.values == BLOCK

    @property
    def block_bytes(self) -> int:
        if self.dtype == EIGHT_BIT:
            return self.values + self.values // QUANT_BLOCK * 4
        return self.values * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_parameter(self) -> float:
        return self.block_bytes / BLOCK


@dataclass(frozen=True)
class Page:
    """A page of all slots' parameters, `blocks` of BLOCK values, and the tensors of its update.

    state: as `Kept.pages` (state.py) has them. block_owners u32 [blocks]: 2 * slot, + 1 unless it is of
    an A, or NO_OWNER. hyper: a Hyper per owner. report f32 [slots, 4]: (norm, clipping factor, 1 if the slot may be
    updated, loss). kept: the rule's own. scratch: what the check has recorded for the update.
    """

    blocks: int
    params: Tensor
    grads: Tensor
    state: tuple[Tensor, ...]
    block_owners: Tensor
    hyper: Tensor
    report: Tensor
    kept: Any
    scratch: list[Tensor] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of values."""
        return self.blocks * BLOCK

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order in which kernels usually bind them."""
        return (self.params, self.grads, *self.state, self.block_owners, self.hyper, self.report)


class UpdateRule(Protocol):
    """An update rule: a frozen dataclass whose fields are the training options that it reads, and its own
    (`own_option`).

    state: may depend on these. kept: where it is on the device and in checkpoints (train/optimizers/state.py).
    Hyper: the struct that its kernels read for each owner, a dataclass of F32 fields (see gpu.struct).
    """

    @property
    def state(self) -> tuple[State, ...]: ...

    kept: ClassVar[Any]
    Hyper: ClassVar[type]

    def hyper(self, step: int, learning_rate: float) -> Any:
        """An owner's Hyper for its 1-based `step`."""

    def record_check(self, program: Program, page: Page, diverged: Tensor) -> None:
        """Record a check that writes 1 into diverged f32 [blocks] if the update would make a parameter of the block
        larger than MAX_PARAMETER or any value non-finite, else 0; only slots that may be updated matter."""

    def record_update(self, program: Program, page: Page) -> None:
        """Record the update of the slots that may be updated; it zeroes the gradients of all slots."""
