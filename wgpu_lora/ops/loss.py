"""Log-probabilities of a batch's targets and their gradient, in one sweep over chunks of the vocabulary.

With W the LM head, the gradient of a row's -log p(target) by its hidden state is sum_v p_v W[v] - W[target]. As in
attention, it is accumulated with an online softmax: each chunk's products are added with p relative to the running
maximum, the previous sum is rescaled, and the result is divided by the softmax's sum at the end. A chunk is multiplied
twice instead of three times, and the logits are never stored as a whole. An objective's weights only scale each row's
gradient, so they may be computed after the sweep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Fixed, In, InOut, Out, Place, kernel, one_per
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
    logits: InOut,
    targets: Fixed,
    count: Fixed,
    state: InOut,
    rescale: InOut,
    *,
    rows: U32,
    cols: U32,
    first: Place[U32],
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


@kernel("target_logprobs.wgsl", grid=lambda c: one_per(c.rows), lib=("linear",))
def target_logprobs(state: In, count: Fixed, logprobs: Out, *, rows: U32) -> Any:
    """logprobs = target's logit - (m + log(sum)), from the state of `softmax_chunk`; 0 for rows >= count[0]."""
    top, total, picked, _ = state.reshape(rows, 4).T
    used = np.arange(rows) < int(count.reshape(-1)[0])
    return np.where(used, picked - (top + np.log(np.where(used, total, 1))), 0)


@kernel("logprob_gradient.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def logprob_gradient(state: In, weights: In, count: Fixed, head_rows: In, dh: InOut, *, rows: U32, cols: U32) -> Any:
    """dh = weights (dh / sum - head_rows); rows of weight 0 and rows >= count[0] give zeros."""
    total = state.reshape(rows, 4)[:, 1]
    used = (weights.reshape(-1) != 0) & (np.arange(rows) < int(count.reshape(-1)[0]))
    gradient = weights.reshape(-1, 1) * (dh / np.where(used, total, 1)[:, None] - head_rows)
    return np.where(used[:, None], gradient, 0)


@kernel("sum_by_slot.wgsl.j2", grid=row_grid(lambda c: c.slots), variants=by_subgroup)
def sum_by_slot(x: In, ranges: Fixed, total: InOut, *, slots: U32) -> Any:
    """total[s] += sum of x over the rows of slot s."""
    return total + np.array([x[a:b].sum() for a, b in ranges.reshape(-1, 2).astype(int)])


@dataclass(frozen=True)
class Targets:
    """The tokens of a batch whose log-probability is computed, compacted into the first `count` of R <= T entries.

    rows: u32 [R], row of the batch, or 0xffffffff for padding. ids: u32 [R]. count: u32 [1].
    """

    rows: Tensor
    ids: Tensor
    count: Tensor


def token_logprobs(rec: Recorder, hidden: Tensor, head: Table, targets: Targets, into: Tensor | None = None) -> Tensor:
    """The log-probability of every target, f32 [R], given hidden states [T, hidden_size]; by default a new tensor.

    For a backward pass, set the weights of the tokens' -log p in the loss with `seed`.
    """
    rows, cols = targets.rows.size, head.in_features
    picked = rec.temp((rows, cols), name="picked")
    rec.dispatch(gather_rows, hidden, targets.rows, picked, rows=rows, cols=cols)
    gradient = rec.training and rec.tracks(hidden)
    dpicked = rec.temp((rows, cols), name="dpicked") if gradient else None
    state, rescale = rec.temp((rows, 4), name="softmax state"), rec.temp((rows,), name="rescale")
    step = max(128, CHUNK_BYTES // (4 * rows) // 128 * 128)
    for first, part in head.chunks(step):
        width = part.shape[0]
        logits = rec.temp((rows, width), name="logits")
        count, kind = targets.count, head.dtype
        rec.dispatch(matmul_nt, picked, part, logits, None, count, m=rows, n=width, k=cols, b_type=kind)
        rec.dispatch(softmax_chunk, logits, targets.ids, count, state, rescale, rows=rows, cols=width, first=first)
        if dpicked:
            old = rescale if first else None
            rec.dispatch(matmul_nn, logits, part, dpicked, old, count, m=rows, n=cols, k=width, b_type=kind)
    logprobs = into or rec.temp((rows,), name="logprobs")
    rec.dispatch(target_logprobs, state, targets.count, logprobs, rows=rows)

    def backward() -> None:
        assert dpicked is not None
        head_rows, weights = embed(rec, targets.ids, head, name="target rows"), rec.gradient(logprobs)
        shape = {"rows": rows, "cols": cols}
        rec.dispatch(logprob_gradient, state, weights, targets.count, head_rows, dpicked, **shape)
        dhidden = rec.new_gradient(hidden)
        rec.dispatch(fill, dhidden, size=dhidden.size)
        rec.dispatch(scatter_rows, dpicked, targets.rows, dhidden, **shape)

    rec.node(backward, inputs=[hidden], outputs=[logprobs])
    return logprobs


def seed(rec: Recorder, logprobs: Tensor, weights: Tensor) -> None:
    """Starts the backward pass of a loss whose derivative by each token's -log p is `weights`, f32 [R]."""
    rec.give_gradient(logprobs, weights)
