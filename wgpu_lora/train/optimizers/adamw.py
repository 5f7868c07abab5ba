"""AdamW (Loshchilov and Hutter 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Fixed, In, InOut, Out, kernel, one_per
from wgpu_lora.gpu.part import some_blocks
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.struct import struct_columns
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.optimizer import BLOCK, MAX_PARAMETER, NO_SLOT
from wgpu_lora.ops.rows import by_subgroup, row_grid
from wgpu_lora.train.optimizers.base import Page, State


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


@dataclass(frozen=True)
class AdamW:
    """AdamW, with the names and defaults of transformers' TrainingArguments."""

    state: ClassVar[tuple[State, ...]] = (State("first_moment"), State("second_moment", least=0.0))
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
        )

    @staticmethod
    def record_check(program: Program, page: Page, diverged: Tensor) -> None:
        program.dispatch(adamw_check, *page.tensors, diverged, blocks=page.blocks)

    @staticmethod
    def record_update(program: Program, page: Page) -> None:
        program.dispatch(adamw, *page.tensors, size=page.size)


PART = some_blocks("params grads first_moment second_moment block_slots diverged", BLOCK)


@kernel(
    "optimizers/adamw_check.wgsl.j2",
    grid=row_grid(lambda c: c.blocks),
    lib=("adamw",),
    structs=(Hyper,),
    variants=by_subgroup,
    part=PART,
)
def adamw_check(
    params: In,
    grads: In,
    first_moment: In,
    second_moment: In,
    block_slots: Fixed,
    hyper: Fixed,
    report: In,
    diverged: Out,
    *,
    blocks: U32,
    limit: F32 = MAX_PARAMETER,
) -> Any:
    """diverged[b] = 1 if `adamw` would make a parameter of block b larger than limit, or any value non-finite."""
    go, new, m, v = _updated(params, grads, first_moment, second_moment, block_slots[:blocks], hyper, report)
    with np.errstate(over="ignore"):  # beyond float32
        bad = ~(np.abs(new) <= limit) | ~np.isfinite(m.astype(np.float32)) | ~np.isfinite(v.astype(np.float32))
    return (go & bad).reshape(blocks, BLOCK).any(axis=1).astype(np.float64)


@kernel(
    "optimizers/adamw.wgsl",
    grid=lambda c: one_per(c.size // 4),
    lib=("linear", "adamw"),
    structs=(Hyper,),
    part=PART,
)
def adamw(
    params: InOut,
    grads: InOut,
    first_moment: InOut,
    second_moment: InOut,
    block_slots: Fixed,
    hyper: Fixed,
    report: In,
    *,
    size: U32,
) -> Any:
    """AdamW on the clipped gradient; zeroes gradients and skips gated slots. size is a multiple of 4, as blocks are."""
    go, step, m, v = _updated(params, grads, first_moment, second_moment, block_slots, hyper, report)
    used = np.repeat(block_slots, BLOCK)[:size] != NO_SLOT
    return (
        np.where(go, step, params),
        np.where(used, 0, grads),
        np.where(go, m, first_moment),
        np.where(go, v, second_moment),
    )


def _updated(
    params: Any, grads: Any, first_moment: Any, second_moment: Any, block_slots: Any, hyper: Any, report: Any
) -> tuple[Any, Any, Any, Any]:
    """(whether it is updated, new parameter, new first and second moment) for every value."""
    slot = np.repeat(block_slots.astype(np.int64), BLOCK)[: params.size]
    used = slot != NO_SLOT
    slot = np.where(used, slot, 0)
    h = struct_columns(Hyper, hyper)
    _, factor, fine, _ = report.reshape(-1, 4)[slot].T
    g = grads * factor
    m = h.beta1[slot] * first_moment + h.rest1[slot] * g
    v = h.beta2[slot] * second_moment + h.rest2[slot] * g**2
    rate = h.learning_rate[slot]
    moved = rate * (m / h.correction1[slot]) / (np.sqrt(v / h.correction2[slot]) + h.eps[slot])
    return used & (fine != 0), params * (1 - rate * h.weight_decay[slot]) - moved, m, v
