"""AdamW whose state is held in 8-bit codes, as in bitsandbytes (Dettmers et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from wgpu_lora.gpu.kernel import F32, U32, In, InOut, Out, ReadOnly, Word, by_subgroup, kernel, row_grid
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.gradient_norm import MAX_PARAMETER
from wgpu_lora.train.optimizers.adamw import MOMENTS, AdamW, Hyper, adamw_step
from wgpu_lora.train.optimizers.eight_bit import EightBit, diverging_8bit, some_records, updated_8bit
from wgpu_lora.train.optimizers.update_rule import EIGHT_BIT, Page, State


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    state: ClassVar[tuple[State, ...]] = (
        State("first_moment", EIGHT_BIT),
        State("second_moment", EIGHT_BIT, minimum=0.0),
    )
    state_class: ClassVar[Any] = EightBit

    def record_check(self, program: Program, page: Page, diverged: Tensor) -> None:
        values = page.params, page.grads, *page.state, page.hyper, page.report
        program.dispatch(adamw_8bit_check, *values, diverged, blocks=page.blocks)

    def record_update(self, program: Program, page: Page) -> None:
        values = page.params, page.grads, *page.state, page.hyper, page.report
        program.dispatch(adamw_8bit, *values, blocks=page.blocks)


@kernel(
    "optimizers/check_8bit.wgsl.j2",
    grid=row_grid(lambda c: c.blocks),
    lib=("dynamic_map",),
    structs=(Hyper,),
    variants=by_subgroup,
    part=some_records,
)
def adamw_8bit_check(
    params: In,
    grads: In,
    codes: In,
    values: In,
    places: ReadOnly,
    hyper: ReadOnly,
    report: In,
    diverged: Out,
    *,
    blocks: U32,
    limit: F32 = MAX_PARAMETER,
    rule: Word = "adamw",
    states: Word = MOMENTS,
) -> Any:
    """diverged[b] = 1 if `adamw_8bit` would make a parameter of block b larger than limit, or any value non-finite."""
    return diverging_8bit(adamw_step, Hyper, 2, params, grads, codes, values, places, hyper, report)


@kernel(
    "optimizers/update_8bit.wgsl.j2",
    grid=row_grid(lambda c: 4 * c.blocks),
    lib=("dynamic_map",),
    structs=(Hyper,),
    variants=by_subgroup,
    part=some_records,
)
def adamw_8bit(
    params: InOut,
    grads: InOut,
    codes: InOut,
    values: InOut,
    places: ReadOnly,
    hyper: ReadOnly,
    report: In,
    *,
    blocks: U32,
    rule: Word = "adamw",
    states: Word = MOMENTS,
) -> Any:
    """`adamw` with its state in records (eight_bit.py): decoded, updated, and encoded with new scales."""
    return updated_8bit(adamw_step, Hyper, 2, params, grads, codes, values, places, hyper, report)
