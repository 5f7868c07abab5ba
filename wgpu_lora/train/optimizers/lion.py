"""Lion (Chen et al. 2023): the sign of a momentum, so every value moves by the same amount."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, In, InOut, Out, ReadOnly, Word, by_subgroup, kernel, linear_grid, row_grid
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.gradient_norm import MAX_PARAMETER
from wgpu_lora.train.optimizers.update_rule import Page, PlainState, State, apply_update, find_diverged, slot_slice


@dataclass(frozen=True)
class Hyper:
    """rest = 1 - beta, computed in float64."""

    learning_rate: F32
    beta1: F32
    beta2: F32
    weight_decay: F32
    rest1: F32
    rest2: F32


@dataclass(frozen=True)
class Lion:
    """Lion, with the betas of transformers' TrainingArguments, as there."""

    state: ClassVar[tuple[State, ...]] = (State("momentum"),)
    state_class: ClassVar[Any] = PlainState
    Hyper: ClassVar[type] = Hyper

    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999

    def hyper(self, step: int, learning_rate: float) -> Any:
        return Hyper(
            learning_rate=learning_rate,
            beta1=self.adam_beta1,
            beta2=self.adam_beta2,
            weight_decay=self.weight_decay,
            rest1=1 - self.adam_beta1,
            rest2=1 - self.adam_beta2,
        )

    def record_check(self, program: Program, page: Page, diverged: Tensor) -> None:
        program.dispatch(lion_check, *page.tensors, diverged, blocks=page.blocks)

    def record_update(self, program: Program, page: Page) -> None:
        program.dispatch(lion, *page.tensors, size=page.size)


def lion_moved(h: Any, params: Any, g: Any, momentum: Any) -> tuple[Any, Any]:
    """New (parameters, momentum)."""
    direction = np.sign(h.beta1 * momentum + h.rest1 * g)
    moved = params * (1 - h.learning_rate * h.weight_decay) - h.learning_rate * direction
    return moved, h.beta2 * momentum + h.rest2 * g


PART = slot_slice("momentum")


@kernel(
    "optimizers/check.wgsl.j2",
    grid=row_grid(lambda c: c.blocks),
    structs=(Hyper,),
    variants=by_subgroup,
    part=PART,
)
def lion_check(
    params: In,
    grads: In,
    momentum: In,
    block_owners: ReadOnly,
    hyper: ReadOnly,
    report: In,
    diverged: Out,
    *,
    blocks: U32,
    limit: F32 = MAX_PARAMETER,
    rule: Word = "lion",
    held: Word = "f32",
    states: Word = "momentum",
) -> Any:
    """diverged[b] = 1 if `lion` would make a parameter of block b larger than limit, or any value non-finite."""
    return find_diverged(lion_moved, Hyper, params, grads, (momentum,), block_owners[:blocks], hyper, report)


@kernel(
    "optimizers/update.wgsl.j2", grid=lambda c: linear_grid(c.size // 4), lib=("linear",), structs=(Hyper,), part=PART
)
def lion(
    params: InOut,
    grads: InOut,
    momentum: InOut,
    block_owners: ReadOnly,
    hyper: ReadOnly,
    report: In,
    *,
    size: U32,
    rule: Word = "lion",
    held: Word = "f32",
    states: Word = "momentum",
) -> Any:
    """Lion on the clipped gradient; zeroes gradients and skips gated slots. size is a multiple of 4, as blocks are."""
    return apply_update(lion_moved, Hyper, params, grads, (momentum,), block_owners, hyper, report)
