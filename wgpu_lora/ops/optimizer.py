"""Gradient norm, clipping and AdamW over flat pages of parameters, each slot by its own hyper-parameters."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Fixed, In, InOut, Out, kernel, one_per
from wgpu_lora.ops.rows import by_subgroup, row_grid

BLOCK = 1024  # values; every tensor of a slot is padded to whole blocks
NO_SLOT = 0xFFFFFFFF
HYPER_FIELDS = 12  # floats of a slot's record; the shaders' struct Hyper
# Largest magnitude of a parameter: 16 times that of float16, in which adapters are served.
MAX_PARAMETER = float(1 << 20)


@kernel("square_sums.wgsl.j2", grid=row_grid(lambda c: c.blocks), variants=by_subgroup)
def square_sums(x: In, sums: Out, *, blocks: U32) -> Any:
    """sums[b] = sum of the squares of block b."""
    return (x.reshape(blocks, BLOCK) ** 2).sum(axis=1)


@kernel("gradient_norm.wgsl.j2", grid=row_grid(lambda c: c.slots), lib=("adamw",), variants=by_subgroup)
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


@kernel("adamw_check.wgsl.j2", grid=row_grid(lambda c: c.blocks), lib=("adamw",), variants=by_subgroup)
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
    """diverged[b] = 1 where `adamw` would leave block b with a parameter beyond +-limit, or anything not finite."""
    go, new, m, v = _updated(params, grads, first_moment, second_moment, block_slots[:blocks], hyper, report)
    with np.errstate(over="ignore"):  # what a float32 cannot hold
        bad = ~(np.abs(new) <= limit) | ~np.isfinite(m.astype(np.float32)) | ~np.isfinite(v.astype(np.float32))
    return (go & bad).reshape(blocks, BLOCK).any(axis=1).astype(np.float64)


@kernel("update_gate.wgsl.j2", grid=row_grid(lambda c: c.slots), variants=by_subgroup)
def update_gate(diverged: In, block_slots: Fixed, report: InOut, *, slots: U32, blocks: U32) -> Any:
    """report[s, 2] = 0 where any block of slot s would diverge."""
    report = report.reshape(slots, 4).copy()
    hit = block_slots[:blocks][diverged[:blocks] != 0].astype(np.int64)
    report[hit[hit != NO_SLOT], 2] = 0
    return report


@kernel("adamw.wgsl", grid=lambda c: one_per(c.size // 4), lib=("linear", "adamw"))
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
    """(whether it is updated, new parameter, new first and second moment) of every value."""
    slot = np.repeat(block_slots.astype(np.int64), BLOCK)[: params.size]
    used = slot != NO_SLOT
    slot = np.where(used, slot, 0)
    lr, beta1, beta2, eps, decay, c1, c2 = hyper.reshape(-1, HYPER_FIELDS)[slot, :7].T
    rest1, rest2 = hyper.reshape(-1, HYPER_FIELDS)[slot, 9:11].T
    _, factor, fine, _ = report.reshape(-1, 4)[slot].T
    g = grads * factor
    m = beta1 * first_moment + rest1 * g
    v = beta2 * second_moment + rest2 * g**2
    step = params * (1 - lr * decay) - lr * (m / c1) / (np.sqrt(v / c2) + eps)
    return used & (fine != 0), step, m, v
