"""AdamW (Loshchilov and Hutter 2019)."""

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
    """correction = 1 - beta^step; rest = 1 - beta, in float64, since 1 - 0.999 in f32 is off in the fifth digit."""

    learning_rate: F32
    beta1: F32
    beta2: F32
    eps: F32
    weight_decay: F32
    correction1: F32
    correction2: F32
    rest1: F32
    rest2: F32
    step: F32


@dataclass(frozen=True)
class AdamW:
    """AdamW, with the names and defaults of transformers' TrainingArguments."""

    state: ClassVar[tuple[State, ...]] = (State("first_moment"), State("second_moment", minimum=0.0))
    state_class: ClassVar[Any] = PlainState
    Hyper: ClassVar[type] = Hyper

    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8

    def hyper(self, step: int, learning_rate: float) -> Any:
        return Hyper(
            learning_rate=learning_rate,
            beta1=self.adam_beta1,
            beta2=self.adam_beta2,
            eps=self.adam_epsilon,
            weight_decay=self.weight_decay,
            correction1=1 - self.adam_beta1**step,
            correction2=1 - self.adam_beta2**step,
            rest1=1 - self.adam_beta1,
            rest2=1 - self.adam_beta2,
            step=step,
        )

    def record_check(self, program: Program, page: Page, diverged: Tensor) -> None:
        program.dispatch(adamw_check, *page.tensors, diverged, blocks=page.blocks)

    def record_update(self, program: Program, page: Page) -> None:
        program.dispatch(adamw, *page.tensors, size=page.size)


def adamw_step(h: Any, params: Any, g: Any, first_moment: Any, second_moment: Any) -> tuple[Any, Any, Any]:
    """New (parameters, first moment, second moment)."""
    m = h.beta1 * first_moment + h.rest1 * g
    v = h.beta2 * second_moment + h.rest2 * g**2
    moved = h.learning_rate * (m / h.correction1) / (np.sqrt(v / h.correction2) + h.eps)
    return params * (1 - h.learning_rate * h.weight_decay) - moved, m, v


MOMENTS = "first_moment second_moment"
PART = slot_slice(*MOMENTS.split())


@kernel(
    "optimizers/check.wgsl.j2",
    grid=row_grid(lambda c: c.blocks),
    structs=(Hyper,),
    variants=by_subgroup,
    part=PART,
)
def adamw_check(
    params: In,
    grads: In,
    first_moment: In,
    second_moment: In,
    block_owners: ReadOnly,
    hyper: ReadOnly,
    report: In,
    diverged: Out,
    *,
    blocks: U32,
    limit: F32 = MAX_PARAMETER,
    rule: Word = "adamw",
    held: Word = "f32",
    states: Word = MOMENTS,
) -> Any:
    """diverged[b] = 1 if `adamw` would make a parameter of block b larger than limit, or any value non-finite."""
    moments = first_moment, second_moment
    return find_diverged(adamw_step, Hyper, params, grads, moments, block_owners[:blocks], hyper, report)


@kernel(
    "optimizers/update.wgsl.j2", grid=lambda c: linear_grid(c.size // 4), lib=("linear",), structs=(Hyper,), part=PART
)
def adamw(
    params: InOut,
    grads: InOut,
    first_moment: InOut,
    second_moment: InOut,
    block_owners: ReadOnly,
    hyper: ReadOnly,
    report: In,
    *,
    size: U32,
    rule: Word = "adamw",
    held: Word = "f32",
    states: Word = MOMENTS,
) -> Any:
    """AdamW on the clipped gradient; zeroes gradients and skips gated slots. size is a multiple of 4, as blocks are."""
    return apply_update(adamw_step, Hyper, params, grads, (first_moment, second_moment), block_owners, hyper, report)
