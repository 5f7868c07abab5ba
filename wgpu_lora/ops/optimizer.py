"""Gradient norm, clipping and AdamW over flat pages of parameters, each slot by its own hyper-parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Fixed, In, InOut, Out, kernel, one_per
from wgpu_lora.ops.rows import by_subgroup, row_grid

BLOCK = 1024  # values; every tensor of a slot is padded to whole blocks
NO_SLOT = 0xFFFFFFFF
HYPER_FIELDS = 12  # floats of a slot's record; the shaders' struct Hyper


@kernel("square_sums.wgsl.j2", grid=row_grid(lambda c: c.blocks), variants=by_subgroup)
def square_sums(x: In, sums: Out, *, blocks: U32) -> Any:
    """sums[b] = sum of the squares of block b."""
    return (x.reshape(blocks, BLOCK) ** 2).sum(axis=1)


@kernel("gradient_norm.wgsl.j2", grid=row_grid(lambda c: c.slots), variants=by_subgroup)
def gradient_norm(sums: In, block_slots: Fixed, hyper: Fixed, loss: In, report: Out, *, slots: U32, blocks: U32) -> Any:
    """report[s] = (norm, clipping factor, 1 where an update may be applied, loss)."""
    report = np.zeros((slots, 4))
    for slot in range(slots):
        norm = np.sqrt(sums[:blocks][block_slots[:blocks] == slot].sum())
        limit, active = hyper.reshape(slots, HYPER_FIELDS)[slot, 7:9]
        factor = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        fine = np.isfinite(norm) and np.isfinite(loss[slot]) and active != 0
        report[slot] = (norm, factor, float(fine), loss[slot])
    return report


@kernel("adamw.wgsl", grid=lambda c: one_per(c.size // 4), lib=("linear",))
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
    """AdamW (Loshchilov and Hutter 2019) on the clipped gradient; gradients are zeroed, gated slots left alone.

    size is a multiple of 4: blocks are."""
    slot = np.repeat(block_slots.astype(np.int64), BLOCK)[:size]
    used = slot != NO_SLOT
    slot = np.where(used, slot, 0)
    lr, beta1, beta2, eps, decay, c1, c2 = hyper.reshape(-1, HYPER_FIELDS)[slot, :7].T
    rest1, rest2 = hyper.reshape(-1, HYPER_FIELDS)[slot, 9:11].T
    _, factor, fine, _ = report.reshape(-1, 4)[slot].T
    go = used & (fine != 0)
    g = grads * factor
    m = np.where(go, beta1 * first_moment + rest1 * g, first_moment)
    v = np.where(go, beta2 * second_moment + rest2 * g**2, second_moment)
    step = params * (1 - lr * decay) - lr * (m / c1) / (np.sqrt(v / c2) + eps)
    return np.where(go, step, params), np.where(used, 0, grads), m, v
