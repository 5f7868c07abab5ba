"""Kernels shared by all optimizers, over flat pages of parameters: gradient norms, clipping, and update checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, In, InOut, Out, ReadOnly, by_subgroup, kernel, row_grid
from wgpu_lora.gpu.reference_values import select_blocks
from wgpu_lora.gpu.struct import struct_columns

BLOCK = 1024  # values; each slot's tensors are padded to whole blocks
# The owner of a block is 2 * slot for A and 2 * slot + 1 for other matrices, which may have another learning rate.
NO_OWNER = 0xFFFFFFFF
# Largest magnitude of a parameter: 16 times that of float16, in which adapters are served.
MAX_PARAMETER = float(1 << 20)


@dataclass(frozen=True)
class Clip:
    """A slot in a step. max_grad_norm: 0 disables clipping. enabled: 1 if the slot takes the step, else 0."""

    max_grad_norm: F32
    enabled: F32 = 1.0


@kernel(
    "square_sums.wgsl.j2",
    grid=row_grid(lambda c: c.blocks),
    variants=by_subgroup,
    part=select_blocks("x sums", BLOCK),
)
def square_sums(x: In, sums: Out, *, blocks: U32) -> Any:
    """sums[b] = sum of the squares of block b."""
    return (x.reshape(blocks, BLOCK) ** 2).sum(axis=1)


@kernel("gradient_norm.wgsl.j2", grid=row_grid(lambda c: c.slots), structs=(Clip,), variants=by_subgroup)
def gradient_norm(
    sums: In, block_owners: ReadOnly, clips: ReadOnly, loss: In, report: Out, *, slots: U32, blocks: U32
) -> Any:
    """report[s] = (norm, clipping factor, 1 if the update may be applied, loss)."""
    clip, report = struct_columns(Clip, clips), np.zeros((slots, 4))
    for slot in range(slots):
        norm = np.sqrt(sums[:blocks][block_owners[:blocks] // 2 == slot].sum())
        limit, active = clip.max_grad_norm[slot], clip.enabled[slot]
        factor = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        fine = np.isfinite(norm) and np.isfinite(loss[slot]) and active != 0
        report[slot] = (norm, factor, float(fine), loss[slot])
    return report


@kernel("update_gate.wgsl.j2", grid=row_grid(lambda c: c.slots), variants=by_subgroup)
def update_gate(diverged: In, block_owners: ReadOnly, report: InOut, *, slots: U32, blocks: U32) -> Any:
    """report[s, 2] = 0 if any block of slot s would diverge."""
    report = report.reshape(slots, 4).copy()
    hit = block_owners[:blocks][diverged[:blocks] != 0].astype(np.int64)
    report[hit[hit != NO_OWNER] // 2, 2] = 0
    return report
