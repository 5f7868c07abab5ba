"""Stochastic gradient descent with momentum, as torch.optim.SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.kernel import F32, U32, In, InOut, Out, ReadOnly, Word, by_subgroup, kernel, linear_grid, row_grid
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.names.spelling import flag
from wgpu_lora.ops.gradient_norm import MAX_PARAMETER
from wgpu_lora.train.optimizers.update_rule import Page, PlainState, State, apply_update, find_diverged, slot_slice
from wgpu_lora.train.option_types import Range, own_option


@dataclass(frozen=True)
class Hyper:
    learning_rate: F32
    momentum: F32
    weight_decay: F32
    nesterov: F32


@dataclass(frozen=True)
class SGD:
    """SGD. Its weight decay is added to the gradient, as in PyTorch, and without momentum it keeps no state."""

    state_class: ClassVar[Any] = PlainState
    Hyper: ClassVar[type] = Hyper

    weight_decay: float = 0.0
    momentum: float = own_option(0.0, "Decay of the momentum.", within=Range(at_least=0, below=1))
    nesterov: bool = own_option(False, "Nesterov's momentum.")

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise UserError(f"{flag('optim_args')}: nesterov=true needs a momentum: add momentum=0.9, or leave it out.")

    @property
    def state(self) -> tuple[State, ...]:
        return (State("momentum"),) if self.momentum else ()

    def hyper(self, step: int, learning_rate: float) -> Any:
        return Hyper(learning_rate, self.momentum, self.weight_decay, float(self.nesterov))

    def record_check(self, program: Program, page: Page, diverged: Tensor) -> None:
        values = page.params, page.grads, page.block_owners, page.hyper, page.report
        program.dispatch(sgd_check, *values, diverged, *page.state, blocks=page.blocks)

    def record_update(self, program: Program, page: Page) -> None:
        values = page.params, page.grads, page.block_owners, page.hyper, page.report
        program.dispatch(sgd, *values, *page.state, size=page.size)


def sgd_moved(h: Any, params: Any, g: Any, momentum: Any = 0.0) -> tuple[Any, Any]:
    """New (parameters, momentum)."""
    decayed = g + h.weight_decay * params
    m = h.momentum * momentum + decayed
    step = np.where(h.nesterov != 0, decayed + h.momentum * m, m)
    return params - h.learning_rate * step, m


PART = slot_slice("momentum")


@kernel(
    "optimizers/check.wgsl.j2",
    grid=row_grid(lambda c: c.blocks),
    structs=(Hyper,),
    variants=by_subgroup,
    part=PART,
)
def sgd_check(
    params: In,
    grads: In,
    block_owners: ReadOnly,
    hyper: ReadOnly,
    report: In,
    diverged: Out,
    momentum: In = None,
    *,
    blocks: U32,
    limit: F32 = MAX_PARAMETER,
    rule: Word = "sgd",
    held: Word = "f32",
    states: Word = "momentum",
) -> Any:
    """diverged[b] = 1 if `sgd` would make a parameter of block b larger than limit, or any value non-finite."""
    buffers = () if momentum is None else (momentum,)
    return find_diverged(sgd_moved, Hyper, params, grads, buffers, block_owners[:blocks], hyper, report)


@kernel(
    "optimizers/update.wgsl.j2", grid=lambda c: linear_grid(c.size // 4), lib=("linear",), structs=(Hyper,), part=PART
)
def sgd(
    params: InOut,
    grads: InOut,
    block_owners: ReadOnly,
    hyper: ReadOnly,
    report: In,
    momentum: InOut = None,
    *,
    size: U32,
    rule: Word = "sgd",
    held: Word = "f32",
    states: Word = "momentum",
) -> Any:
    """SGD on the clipped gradient; zeroes gradients and skips gated slots. size is a multiple of 4, as blocks are."""
    buffers = () if momentum is None else (momentum,)
    return apply_update(sgd_moved, Hyper, params, grads, buffers, block_owners, hyper, report)
