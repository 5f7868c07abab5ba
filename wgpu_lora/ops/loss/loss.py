"""Log-probabilities of a batch's targets and their gradient, in one pass over chunks of the vocabulary.

With W the LM head, the gradient of a row's -log p(target) by its hidden state is sum_v p_v W[v] - W[target]. As in
attention, it is accumulated with an online softmax: each chunk's products are added with p relative to the running
maximum, the previous sum is rescaled, and the result is divided by the softmax's sum at the end. A chunk is multiplied
twice instead of three times, and the logits are never stored as a whole. An objective's weights only scale each row's
gradient, so they may be computed after the pass.

Objectives may also ask for the logits of a few tokens per row, the *support*. These are hidden from the softmax, which
then is that of all other tokens, the *rest*: what an objective computes of both has no cancellation, however little
probability is outside of the support. With beta the loss's derivatives by the support's logits, and r the sum of those
by the others, which have the proportions of their softmax q, the gradient is sum_i beta_i W[id_i] + r sum_v q_v W[v].

If the head has a soft cap, all logits here are capped, and derivatives by them are multiplied by the cap's slope before
they meet W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import (
    F32,
    U32,
    Flag,
    In,
    InOut,
    Offset,
    Out,
    ReadOnly,
    by_subgroup,
    kernel,
    linear_grid,
    row_grid,
)
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.elementwise import add_forward, fill
from wgpu_lora.ops.embedding import EmbeddingTable, cap_gradient, embed, gather_rows, head_logits, scatter_rows
from wgpu_lora.ops.half_precision import head_operand
from wgpu_lora.ops.loss.sparse_logits import LOWEST, add_support, hide_logits, pick_logits
from wgpu_lora.ops.recorder import Recorder

CHUNK_BYTES = 32 << 20  # of one chunk's logits


@kernel("softmax_chunk.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def softmax_chunk(
    logits: InOut,
    targets: ReadOnly,
    count: ReadOnly,
    state: InOut,
    rescale: InOut,
    apart: Out = None,
    *,
    rows: U32,
    cols: U32,
    first: Offset[U32],
    rate: F32 = 1.0,
    hidden: Flag = False,
    cap: F32 = 0.0,
    entropy: Flag = False,
) -> Any:
    """logits, or `apart` if it is there -> exp(rate (logits - m')), with 0 for hidden ones (LOWEST) if there are any;
    state = (m', sum', target's logit, 0); rescale = exp(rate (m - m')). Rows < count[0]. With entropy, the last is the
    sum of p rate (logit - m'), with p the exponentials. With a cap, the results, after they have been added to sum',
    are multiplied by 1 - (logits / cap)^2, the derivatives of logits that are capped."""
    result, state, rescale = logits.copy(), state.reshape(rows, 4).copy(), rescale.copy()
    for r in range(int(count.reshape(-1)[0])):
        old, total, target_logit, spread = (LOWEST, 0.0, 0.0, 0.0) if first == 0 else state[r]
        top = max(old, logits[r].max())
        column = int(targets[r]) - first
        target_logit = logits[r, column] if 0 <= column < cols else target_logit
        result[r] = np.exp(rate * (logits[r] - top)) * (1 if not hidden else logits[r] > LOWEST / 2)
        rescale[r] = np.exp(rate * (old - top))
        last = 0.0
        if entropy:
            chunk_sum = (np.where(result[r] > 0, result[r] * rate * (logits[r] - top), 0)).sum()
            last = chunk_sum + ((spread + total * rate * (old - top)) * rescale[r] if total > 0 else 0.0)
        state[r] = (top, total * rescale[r] + result[r].sum(), target_logit, last)
        if cap:
            result[r] = np.where(result[r] == 0, 0, result[r] * (1 - (logits[r] / cap) ** 2))
    if apart is None:
        return result, state, rescale
    output = apart.copy()
    output[: int(count.reshape(-1)[0])] = result[: int(count.reshape(-1)[0])]
    return logits, state, rescale, output


@kernel("target_logprobs.wgsl", grid=lambda c: linear_grid(c.rows), lib=("linear",))
def target_logprobs(state: In, count: ReadOnly, logprobs: Out, *, rows: U32, rate: F32 = 1.0) -> Any:
    """logprobs = rate target's logit - (rate m + log(sum)), by the state of `softmax_chunk`; 0 for rows >= count."""
    top, total, target_logits, _ = state.reshape(rows, 4).T
    valid = np.arange(rows) < int(count.reshape(-1)[0])
    return np.where(valid, rate * (target_logits - top) - np.log(np.where(valid, total, 1)), 0)


@kernel("target_hits.wgsl", grid=lambda c: linear_grid(c.rows), lib=("linear",))
def target_hits(state: In, count: ReadOnly, hits: Out, *, rows: U32) -> Any:
    """hits = 1 where no logit is larger than the target's, by the state of `softmax_chunk`; 0 for rows >= count."""
    top, _, target_logits, _ = state.reshape(rows, 4).T
    return np.where(np.arange(rows) < int(count.reshape(-1)[0]), target_logits >= top, 0)


@kernel("logprob_gradient.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def logprob_gradient(
    state: In,
    weights: In,
    count: ReadOnly,
    head_rows: In,
    dh: InOut,
    *,
    rows: U32,
    cols: U32,
    rate: F32 = 1.0,
    cap: F32 = 0.0,
) -> Any:
    """dh = rate weights (dh / sum - slope head_rows); rows of weight 0 and rows >= count[0] give zeros. slope = 1 or,
    with a cap, 1 - (target's logit / cap)^2."""
    _, total, target_logits, _ = state.reshape(rows, 4).T
    valid = (weights.reshape(-1) != 0) & (np.arange(rows) < int(count.reshape(-1)[0]))
    slope = np.where(valid, 1 - (target_logits / cap) ** 2, 0) if cap else np.ones(rows)
    gradient = rate * weights.reshape(-1, 1) * (dh / np.where(valid, total, 1)[:, None] - slope[:, None] * head_rows)
    return np.where(valid[:, None], gradient, 0)


@kernel("rest_gradient.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def rest_gradient(
    state: In, rests: In, count: ReadOnly, dh: In, total: InOut, *, rows: U32, cols: U32, accumulate: Flag = False
) -> Any:
    """total (+)= rests dh / sum; nothing for rows without a weight and rows >= count[0]."""
    valid = (rests.reshape(-1) != 0) & (np.arange(rows) < int(count.reshape(-1)[0]))
    share = rests.reshape(-1, 1) * dh.reshape(rows, cols) / np.where(valid, state.reshape(rows, 4)[:, 1], 1)[:, None]
    return np.where(valid[:, None], share, 0) + (total.reshape(rows, cols) if accumulate else 0)


@kernel("sum_by_slot.wgsl.j2", grid=row_grid(lambda c: c.slots), variants=by_subgroup)
def sum_by_slot(x: In, ranges: ReadOnly, total: InOut, *, slots: U32, largest: Flag = False) -> Any:
    """total[s] += sum of x over the rows of slot s; with `largest`, the largest of these, total and 0 instead."""
    if largest:
        return np.maximum(total, [x[a:b].max(initial=0) for a, b in ranges.reshape(-1, 2).astype(int)])
    return total + np.array([x[a:b].sum() for a, b in ranges.reshape(-1, 2).astype(int)])


@dataclass(frozen=True)
class Targets:
    """The tokens of a batch whose log-probability is computed, compacted into the first `count` of R <= T entries.

    rows: u32 [R], row of the batch, or 0xffffffff for padding. ids: u32 [R]. count: u32 [1].
    """

    rows: Tensor
    ids: Tensor
    count: Tensor


@dataclass(eq=False)
class VocabularyLogprobs:
    """The results of a pass over the vocabulary for R targets.

    states: f32 [R, 4] by temperature, of the softmax of logits that are not hidden: (largest logit, sum of
    exp((logit - largest) / temperature), target's logit, 0). With `entropy`, the last is the sum of these exponentials
    times their exponents, so that the softmax has the entropy log(second) - last / second.
    logprobs: f32 [R], of targets of rows without a support, at the first temperature.
    support_logits: f32 [R, S] logits by their ids. gradient: set before the backward pass.
    """

    targets: Targets
    logprobs: Tensor
    states: Mapping[float, Tensor]
    support_logits: Mapping[Tensor, Tensor]
    gradient: VocabularyGradient | None = None


@dataclass(frozen=True)
class VocabularyGradient:
    """Derivatives of a loss.

    weights: f32 [R] by temperature, by each target's -log p at that temperature. rests: f32 [R] by temperature, the sum
    of those by all logits that are not hidden, which have the proportions of their softmax. support_gradients: f32
    [R, S] by ids, those by the logits of the support.
    """

    weights: Mapping[float, Tensor] = field(default_factory=dict)
    rests: Mapping[float, Sequence[Tensor]] = field(default_factory=dict)
    support_gradients: Mapping[Tensor, Tensor] = field(default_factory=dict)


def vocabulary_logprobs(
    rec: Recorder,
    hidden: Tensor,
    head: EmbeddingTable,
    targets: Targets,
    into: Tensor | None = None,
    *,
    temperatures: Sequence[float] = (1.0,),
    supports: Sequence[Tensor] = (),
    entropy: bool = False,
) -> VocabularyLogprobs:
    """Softmaxes of the logits of R targets, given hidden states [T, hidden_size].

    For a backward pass, set `gradient`, or use `seed`.

    Args:
        into: f32 [R], for the log-probabilities; by default a new tensor.
        temperatures: of the softmaxes; log-probabilities are those at the first.
        supports: u32 [R, S] each, ids of tokens to pick the logits of and to hide, or NO_ID; in each row once.
        entropy: whether the states have what entropies need.
    """
    rows, cols = targets.rows.size, head.in_features
    inputs = rec.temp((rows, cols), name="picked")
    rec.dispatch(gather_rows, hidden, targets.rows, inputs, rows=rows, cols=cols)
    gradient = rec.training and rec.tracks(hidden)
    sums = {t: rec.temp((rows, cols), name="dpicked") for t in temperatures if gradient}
    states = {t: rec.temp((rows, 4), name="softmax state") for t in temperatures}
    rescales = {t: rec.temp((rows,), name="rescale") for t in temperatures}
    support_logits = {ids: rec.temp(ids.shape, name="picked logits") for ids in supports}
    step = max(128, CHUNK_BYTES // (4 * rows) // 128 * 128)
    for first, part in head.chunks(step):
        width, count = part.rows, targets.count
        logits = rec.temp((rows, width), name="logits")
        rounded, scale, kind = head_operand(rec, inputs, cols, keep=True)
        head_logits(rec.dispatch, rounded, head, part, logits, count, scale, kind)
        for ids, values in support_logits.items():
            chunk = {"rows": rows, "kept": ids.shape[1], "cols": width, "first": first}
            rec.dispatch(pick_logits, logits, ids, count, values, **chunk)
            rec.dispatch(hide_logits, ids, count, logits, **chunk)
        for t in temperatures:
            last = t == temperatures[-1]
            apart = None if last else rec.temp((rows, width), name="exponentials")
            softmax = {
                "rows": rows,
                "cols": width,
                "first": first,
                "rate": 1 / t,
                "hidden": bool(supports),
                "entropy": entropy,
            }
            softmax["cap"] = head.cap if gradient else 0.0
            rec.dispatch(softmax_chunk, logits, targets.ids, count, states[t], rescales[t], apart, **softmax)
            if gradient:
                a, scale, kind = head_operand(rec, apart or logits, width, keep=False)
                tensors = {"a": a, "y": sums[t], "count": count, "a_scale": scale}
                tensors |= {"row_scale": rescales[t]} if first else {}
                shape = {"m": rows, "n": cols, "k": width, "a_type": kind, **part.constants}
                part.dispatch(rec.dispatch, part.gradient, tensors, **shape)
    logprobs = into or rec.temp((rows,), name="logprobs")
    first_rate = 1 / temperatures[0]
    rec.dispatch(target_logprobs, states[temperatures[0]], targets.count, logprobs, rows=rows, rate=first_rate)
    vocabulary = VocabularyLogprobs(targets, logprobs, states, support_logits)

    def backward() -> None:
        assert vocabulary.gradient is not None
        total = _gradient(rec, vocabulary, vocabulary.gradient, head, targets, sums)
        dhidden = rec.new_gradient(hidden)
        rec.dispatch(fill, dhidden, size=dhidden.size)
        rec.dispatch(scatter_rows, total, targets.rows, dhidden, rows=rows, cols=cols)

    rec.node(backward, inputs=[hidden], outputs=[logprobs])
    return vocabulary


def _gradient(
    rec: Recorder,
    vocabulary: VocabularyLogprobs,
    gradient: VocabularyGradient,
    head: EmbeddingTable,
    targets: Targets,
    sums: Mapping[float, Tensor],
) -> Tensor:
    """The gradient by each target's hidden state, f32 [R, hidden_size]."""
    shape = {"rows": targets.rows.size, "cols": head.in_features}
    total: Tensor | None = None
    for t, weights in ((t, weights) for t, tensors in gradient.rests.items() for weights in tensors):
        into = total or rec.temp((shape["rows"], shape["cols"]), name="dpicked")
        accumulate = total is not None
        rec.dispatch(
            rest_gradient, vocabulary.states[t], weights, targets.count, sums[t], into, **shape, accumulate=accumulate
        )
        total = into
    for t, weights in gradient.weights.items():
        head_rows, state = embed(rec, targets.ids, head, name="target rows"), vocabulary.states[t]
        rec.dispatch(
            logprob_gradient, state, weights, targets.count, head_rows, sums[t], **shape, rate=1 / t, cap=head.cap
        )
        if total is None:
            total = sums[t]
        else:
            gradient_sum = rec.temp((shape["rows"], shape["cols"]), name="dpicked")
            rec.dispatch(add_forward, total, sums[t], gradient_sum, size=gradient_sum.size)
            total = gradient_sum
    assert total is not None, "the pass has no gradient"
    for ids, weights in gradient.support_gradients.items():
        by_logits = weights
        if head.cap:
            by_logits = rec.temp(weights.shape, name="before the cap")
            rec.dispatch(
                cap_gradient, weights, vocabulary.support_logits[ids], by_logits, size=weights.size, cap=head.cap
            )
        add_support(rec, by_logits, ids, head, targets.count, total)
    return total


def hits(rec: Recorder, vocabulary: VocabularyLogprobs) -> Tensor:
    """Which targets are the most likely token, f32 [R]: 1 or, for others and for padding, 0. A tie is a hit."""
    state = next(iter(vocabulary.states.values()))
    result = rec.temp(vocabulary.logprobs.shape, name="hits")
    rec.dispatch(target_hits, state, vocabulary.targets.count, result, rows=result.size)
    return result


def seed(vocabulary: VocabularyLogprobs, gradient: VocabularyGradient) -> None:
    """Starts the backward pass of a loss from its derivatives."""
    vocabulary.gradient = gradient
