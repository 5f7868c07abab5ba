"""LM head and cross-entropy in vocabulary chunks, forward and backward in one sweep, all logits never held.

The gradient of a row's loss by its hidden state is sum_v p_v W[v] - W[target]. Like attention, it can be accumulated
with an online softmax: each chunk's products are added with p taken relative to the running maximum, what came before
is rescaled, and the sum divides at the end. So a chunk is multiplied twice, not three times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Fixed, In, InOut, Out, kernel
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.elementwise import fill
from wgpu_lora.ops.embedding import Table, embed, gather_rows, scatter_rows
from wgpu_lora.ops.matmul import matmul_nn, matmul_nt
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.ops.rows import by_subgroup, row_grid

CHUNK_BYTES = 32 << 20  # of one chunk's logits
LOWEST = -3.0e38


@kernel("softmax_chunk.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def softmax_chunk(
    logits: InOut, targets: Fixed, count: Fixed, state: InOut, rescale: InOut, *, rows: U32, cols: U32, first: U32
) -> Any:
    """logits -> exp(logits - m'); state = (m', sum', target's logit, 0); rescale = exp(m - m'). Rows < count[0]."""
    logits, state, rescale = logits.copy(), state.reshape(rows, 4).copy(), rescale.copy()
    for r in range(int(count.reshape(-1)[0])):
        old, total, picked = (LOWEST, 0.0, 0.0) if first == 0 else state[r, :3]
        top = max(old, logits[r].max())
        column = int(targets[r]) - first
        picked = logits[r, column] if 0 <= column < cols else picked
        logits[r] = np.exp(logits[r] - top)
        rescale[r] = np.exp(old - top)
        state[r] = (top, total * rescale[r] + logits[r].sum(), picked, 0)
    return logits, state, rescale


@kernel("loss_finish.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def loss_finish(
    state: In, weight: Fixed, loss: Out, head_rows: In = None, dh: InOut = None, *, rows: U32, cols: U32
) -> Any:
    """loss = m + log(sum) - target's logit; dh = weight (dh / sum - head_rows); rows of weight 0 give zeros."""
    top, total, picked, _ = state.reshape(rows, 4).T
    used = weight.reshape(-1) != 0
    loss = np.where(used, top + np.log(np.where(used, total, 1)) - picked, 0)
    if dh is None:
        return loss
    gradient = weight.reshape(-1, 1) * (dh / np.where(used, total, 1)[:, None] - head_rows)
    return loss, np.where(used[:, None], gradient, 0)


@kernel("sum_by_slot.wgsl.j2", grid=row_grid(lambda c: c.slots), variants=by_subgroup)
def sum_by_slot(x: In, ranges: Fixed, total: InOut, *, slots: U32) -> Any:
    """total[s] += sum of x over the rows of slot s."""
    return total + np.array([x[a:b].sum() for a, b in ranges.reshape(-1, 2).astype(int)])


@dataclass(frozen=True)
class LossInputs:
    """A step's trained rows, compacted: R = T at most, the first `count` of them real.

    rows u32 [R] (row of the batch, 0xffffffff: none), targets u32 [R], weight f32 [R] (1 / the slot's trained tokens
    of the whole optimizer step), count u32 [1], ranges u32 [slots, 2] of compacted rows, total f32 [slots].
    """

    rows: Tensor
    targets: Tensor
    weight: Tensor
    count: Tensor
    ranges: Tensor
    total: Tensor


def cross_entropy(rec: Recorder, hidden: Tensor, head: Table, inputs: LossInputs) -> Tensor:
    """Adds each slot's summed loss to inputs.total, seeds the backward pass, and returns the losses [R]."""
    rows, cols = inputs.rows.size, head.in_features
    picked = rec.temp((rows, cols), name="picked")
    rec.dispatch(gather_rows, hidden, inputs.rows, picked, rows=rows, cols=cols)
    gradient = rec.training and rec.tracks(hidden)
    dpicked = rec.temp((rows, cols), name="dpicked") if gradient else None
    state, rescale = rec.temp((rows, 4), name="softmax state"), rec.temp((rows,), name="rescale")
    step = max(128, CHUNK_BYTES // (4 * rows) // 128 * 128)
    for first, part in head.chunks(step):
        width = part.shape[0]
        logits = rec.temp((rows, width), name="logits")
        count, kind = inputs.count, head.dtype
        rec.dispatch(matmul_nt, picked, part, logits, None, count, m=rows, n=width, k=cols, b_type=kind)
        rec.dispatch(softmax_chunk, logits, inputs.targets, count, state, rescale, rows=rows, cols=width, first=first)
        if dpicked:
            old = rescale if first else None
            rec.dispatch(matmul_nn, logits, part, dpicked, old, count, m=rows, n=cols, k=width, b_type=kind)
    losses = rec.temp((rows,), name="losses")
    targets = embed(rec, inputs.targets, head, name="target rows") if dpicked else None
    rec.dispatch(loss_finish, state, inputs.weight, losses, targets, dpicked, rows=rows, cols=cols)
    rec.dispatch(sum_by_slot, losses, inputs.ranges, inputs.total, slots=inputs.total.size)

    def backward() -> None:
        assert dpicked is not None
        dhidden = rec.new_gradient(hidden)
        rec.dispatch(fill, dhidden, size=dhidden.size)
        rec.dispatch(scatter_rows, dpicked, inputs.rows, dhidden, rows=rows, cols=cols)

    rec.node(backward, inputs=[hidden], outputs=[losses])
    return losses
