"""Causal grouped-query attention over key ranges: one kernel for packed segments, sliding windows and KV caches."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Dim, In, Out, ReadOnly, Word, by_subgroup, cdiv, kernel, row_grid
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.attention.attention_tuning import TUNING, AttentionTuning, held_rows, one_head, some_queries, tilings
from wgpu_lora.ops.recorder import Recorder

Shape = dict[str, Any]
LOWEST = -3.0e38
BLOCK = 16  # keys of a block of a cache


def _over_queries(c: Any) -> tuple[int, int, int]:
    return cdiv(c.rows * c.group, held_rows(c.tile)), c.kv_heads, 1


def _over_keys(c: Any) -> tuple[int, int, int]:
    return cdiv(c.rows, held_rows(c.tile)), c.kv_heads, 1


def _weights(
    q: Any, k: Any, ranges: Any, rows: int, keys: int, kv_heads: int, group: int, dim: int, scale: float, cap: float
) -> Any:
    """(q [h, g, t, d], k [h, s, d], scores, seen [t, s]) in float64."""
    q = q.reshape(rows, kv_heads, group, dim).transpose(1, 2, 0, 3)
    k = k.reshape(keys, kv_heads, dim).transpose(1, 0, 2)
    scores = scale * np.einsum("hgtd,hsd->hgts", q, k)
    scores = cap * np.tanh(scores / cap) if cap else scores
    bounds = ranges.reshape(rows, 4).astype(int)
    column = np.arange(keys)
    visible = (column >= bounds[:, :1]) & (column < bounds[:, 1:2])
    return q, k, np.where(visible, scores, -np.inf), visible


def _rows_first(x: np.ndarray) -> np.ndarray:
    return x.transpose(2, 0, 1, 3)


@kernel(
    "attention/forward.wgsl.j2",
    lib=("tanh",),
    grid=_over_queries,
    variants=tilings(sums=1, scores=1, row_values=2),
    tuning=AttentionTuning(later=("cap", "compute_dtype", "block", "cache_dtype")),
    part=some_queries,
)
def attention_forward(
    q: In,
    k: In,
    v: In,
    ranges: ReadOnly,
    y: Out,
    lse: Out,
    blocks: ReadOnly = None,
    *,
    rows: Dim,
    keys: Dim,
    kv_heads: U32,
    group: U32,
    dim: U32,
    scale: F32,
    cap: F32 = 0.0,
    compute_dtype: Word = "f32",
    block: U32 = 0,
    cache_dtype: Word = "f32",
) -> Any:
    """y[t] = sum_j softmax_j(scale q[t] k[j]) v[j] over the keys ranges[t].xy, and the softmax's log-sum-exp.

    With a cap, the scores s = scale q[t] k[j] are cap tanh(s / cap). Rows with an empty range give zeros. With blocks
    of `block` keys, key j is row blocks[j / block] * block + j % block of k and v, which may be f16."""
    if blocks is not None:
        keys = max(1, int(ranges.reshape(rows, 4)[:, 1].max()))
        row = blocks.reshape(-1).astype(np.int64)[np.arange(keys) // block] * block + np.arange(keys) % block
        k, v = (x.reshape(-1, kv_heads * dim)[row] for x in (k, v))
    _, _, scores, _ = _weights(q, k, ranges, rows, keys, kv_heads, group, dim, scale, cap)
    top = np.maximum(scores.max(axis=-1, keepdims=True), LOWEST)
    lse = top + np.log(np.maximum(np.exp(scores - top).sum(axis=-1, keepdims=True), 1e-38))
    y = np.einsum("hgts,hsd->hgtd", np.exp(scores - lse), v.reshape(keys, kv_heads, dim).transpose(1, 0, 2))
    return _rows_first(y), _rows_first(lse)


@kernel("attention/stats.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def attention_stats(y: In, dy: In, lse: In, stats: Out, *, rows: U32, dim: U32) -> Any:
    """stats[i] = (lse[i], dy[i] · y[i], max |dy[i]|, 0)."""
    delta, largest = (y * dy).reshape(rows, dim).sum(axis=1), np.abs(dy).reshape(rows, dim).max(axis=1)
    return np.stack([lse.reshape(-1), delta, largest, np.zeros(rows)], axis=1)


def _score_gradients(
    q: Any,
    k: Any,
    v: Any,
    dy: Any,
    stats: Any,
    ranges: Any,
    rows: int,
    keys: int,
    kv_heads: int,
    group: int,
    dim: int,
    scale: float,
    cap: float,
) -> Any:
    qs, ks, scores, _ = _weights(q, k, ranges, rows, keys, kv_heads, group, dim, scale, cap)
    stats = stats.reshape(rows, kv_heads, group, 4).transpose(1, 2, 0, 3)
    p = np.exp(scores - stats[..., :1])
    dys = dy.reshape(rows, kv_heads, group, dim).transpose(1, 2, 0, 3)
    dp = np.einsum("hgtd,hsd->hgts", dys, v.reshape(keys, kv_heads, dim).transpose(1, 0, 2))
    ds = scale * p * (dp - stats[..., 1:2])
    if cap:
        ds = ds * (1 - (np.where(np.isneginf(scores), 0.0, scores) / cap) ** 2)
    return qs, ks, dys, p, ds


@kernel(
    "attention/backward_q.wgsl.j2",
    lib=("tanh",),
    grid=_over_queries,
    variants=tilings(sums=1, scores=2),
    tuning=TUNING,
    part=some_queries,
)
def attention_backward_q(
    q: In,
    k: In,
    v: In,
    dy: In,
    stats: In,
    ranges: ReadOnly,
    dq: Out,
    *,
    rows: Dim,
    keys: Dim,
    kv_heads: U32,
    group: U32,
    dim: U32,
    scale: F32,
    cap: F32 = 0.0,
    compute_dtype: Word = "f32",
) -> Any:
    """dq = ds k, with ds = scale p (dy · v - delta) and p = exp(s - lse), and with a cap also ds (1 - (s / cap)^2)."""
    _, ks, _, _, ds = _score_gradients(q, k, v, dy, stats, ranges, rows, keys, kv_heads, group, dim, scale, cap)
    return _rows_first(np.einsum("hgts,hsd->hgtd", ds, ks))


@kernel(
    "attention/backward_kv.wgsl.j2",
    lib=("tanh",),
    grid=_over_keys,
    variants=tilings(sums=2, scores=2, queries=False),
    tuning=TUNING,
    part=one_head,
)
def attention_backward_kv(
    q: In,
    k: In,
    v: In,
    dy: In,
    stats: In,
    ranges: ReadOnly,
    dk: Out,
    dv: Out,
    *,
    rows: Dim,
    kv_heads: U32,
    group: U32,
    dim: U32,
    scale: F32,
    cap: F32 = 0.0,
    compute_dtype: Word = "f32",
) -> Any:
    """dk = ds^T q and dv = p^T dy, summed over the query heads that share a key head.

    Key t is seen by the queries [ranges[t].w, ranges[t].z) without [ranges[t].x, t)."""
    qs, _, dys, p, ds = _score_gradients(q, k, v, dy, stats, ranges, rows, rows, kv_heads, group, dim, scale, cap)
    dk, dv = np.einsum("hgts,hgtd->shd", ds, qs), np.einsum("hgts,hgtd->shd", p, dys)
    return dk, dv


def attention(
    rec: Recorder,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor,
    kv_heads: int,
    scale: float,
    cap: float = 0.0,
    blocks: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, heads, dim] over k and v [S, kv_heads, dim]. Training requires S = T.

    cap: soft cap of the scores, 0 for none.
    blocks: in generation, u32 [count], the block of BLOCK rows of k and v with the keys [BLOCK i, BLOCK (i + 1)).

    ranges [T, 4] u32: first key, one past the last key; one past the last query that sees key t, and the first. All
    queries between these see key t, except rows [first key, t).
    """
    rows, dim = q.shape[0], q.shape[2]
    shape: Shape = {"rows": rows, "kv_heads": kv_heads, "group": q.shape[1] // kv_heads, "dim": dim}
    shape |= {"scale": scale, "cap": cap, "compute_dtype": "f16" if rec.compute_dtype == "f16" else "f32"}
    y, lse = rec.temp(q.shape, name="attended"), rec.temp(q.shape[:2], name="lse")
    if blocks:
        shape |= {"compute_dtype": "f32", "block": BLOCK, "cache_dtype": k.dtype}
        rec.dispatch(attention_forward, q, k, v, ranges, y, lse, blocks, keys=BLOCK * blocks.size, **shape)
        return y
    rec.dispatch(attention_forward, q, k, v, ranges, y, lse, keys=k.shape[0], **shape)
    rec.save_for_backward(y)

    def backward() -> None:
        dy, stats = rec.gradient(y), rec.temp((*q.shape[:2], 4), name="stats")
        rec.dispatch(attention_stats, y, dy, lse, stats, rows=rows * q.shape[1], dim=dim)
        dq, dk, dv = (rec.gradient_target(x)[0] for x in (q, k, v))  # regions of one storage, or of several
        inputs = (rec.rematerialize(q), rec.rematerialize(k), v, dy, stats, ranges)
        rec.dispatch(attention_backward_q, *inputs, dq, keys=k.shape[0], **shape)
        rec.dispatch(attention_backward_kv, *inputs, dk, dv, **shape)

    rec.node(backward, inputs=[q, k, v], outputs=[y])
    return y
