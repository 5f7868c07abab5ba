"""AdamW whose moments are held in bfloat16, two to a word, with stochastic rounding.

With rounding to nearest, the second moment could not decay: 0.999 v is nearer to v than to the next smaller bfloat16.
Rounding up with the probability of the part that is cut off keeps both moments right on average. The random bits are
hashed from the gradient, the old moments and the step, so that they depend on neither packing nor other adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, In, InOut, Out, ReadOnly, Word, by_subgroup, kernel, linear_grid, row_grid
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.gradient_norm import MAX_PARAMETER
from wgpu_lora.train.optimizers.adamw import MOMENTS, PART, AdamW, Hyper, adamw_step
from wgpu_lora.train.optimizers.update_rule import Page, State, apply_update, find_diverged, slot_blocks

BF16_MAX = 3.3895313892515355e38


@dataclass(frozen=True)
class AdamWBf16(AdamW):
    state: ClassVar[tuple[State, ...]] = (State("first_moment", "bf16"), State("second_moment", "bf16", minimum=0.0))

    def record_check(self, program: Program, page: Page, diverged: Tensor) -> None:
        program.dispatch(adamw_bf16_check, *page.tensors, diverged, blocks=page.blocks)

    def record_update(self, program: Program, page: Page) -> None:
        program.dispatch(adamw_bf16, *page.tensors, size=page.size)


def pcg(v: np.ndarray) -> np.ndarray:
    """PCG's output permutation (O'Neill 2014), as a hash. v: uint32."""
    state = v * np.uint32(747796405) + np.uint32(2891336453)
    word = ((state >> ((state >> np.uint32(28)) + np.uint32(4))) ^ state) * np.uint32(277803737)
    hashed: np.ndarray = (word >> np.uint32(22)) ^ word
    return hashed


def bits(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def rounded(values: Any, random: np.ndarray) -> np.ndarray:
    """Stochastically rounded to bfloat16. random: of 16 bits."""
    cut: np.ndarray = (bits(values) + random.astype(np.uint32)) & np.uint32(0xFFFF0000)
    return cut.view(np.float32).astype(np.float64)


@kernel(
    "optimizers/check.wgsl.j2",
    grid=row_grid(lambda c: c.blocks),
    structs=(Hyper,),
    variants=by_subgroup,
    part=PART,
)
def adamw_bf16_check(
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
    held: Word = "bf16",
    states: Word = MOMENTS,
) -> Any:
    """diverged[b] = 1 if `adamw_bf16` would make a parameter of block b larger than limit, or any value non-finite."""
    moments, owners = (first_moment, second_moment), block_owners[:blocks]
    return find_diverged(adamw_step, Hyper, params, grads, moments, owners, hyper, report, BF16_MAX)


@kernel(
    "optimizers/update.wgsl.j2", grid=lambda c: linear_grid(c.size // 4), lib=("linear",), structs=(Hyper,), part=PART
)
def adamw_bf16(
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
    held: Word = "bf16",
    states: Word = MOMENTS,
) -> Any:
    """`adamw` with stochastically rounded moments."""
    moments = first_moment, second_moment
    params, zeroed, m, v = apply_update(adamw_step, Hyper, params, grads, moments, block_owners, hyper, report)
    _, go, h, _ = slot_blocks(Hyper, block_owners, hyper, report, params.size)
    before = (bits(first_moment) >> np.uint32(16)) | (bits(second_moment) & np.uint32(0xFFFF0000))
    random = pcg(bits(grads) ^ pcg(before ^ bits(h.step)))
    m = np.where(go, rounded(m, random & np.uint32(0xFFFF)), first_moment)
    return params, zeroed, m, np.where(go, rounded(v, random >> np.uint32(16)), second_moment)
