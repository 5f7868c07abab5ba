"""Causal grouped-query attention over key ranges: one kernel for packed segments, sliding windows and KV caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import numpy as np

from wgpu_lora.gpu import part
from wgpu_lora.gpu.kernel import F32, U32, Dim, Fixed, In, Out, cdiv, kernel
from wgpu_lora.gpu.single import stored
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.gpu.tiling import Capabilities, Tiling
from wgpu_lora.gpu.tunable import Arrays, Constants
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.ops.rows import by_subgroup, row_grid

Shape = dict[str, Any]
LOWEST = -3.0e38
CHECKED = 32  # queries and keys of the cut that is checked, approximately


def _lanes(capabilities: Capabilities, c: Any) -> list[Tiling]:
    plain, size = Tiling("plain", 32), capabilities.subgroup_size
    if size < 4:
        return [plain]
    found = [Tiling("broadcast", size)]
    if capabilities.int64:
        found.insert(0 if capabilities.software else 1, replace(found[0], wide=True))
    return [*found, plain]


def _lanes_and_tile(capabilities: Capabilities, c: Any) -> list[Tiling]:
    # On a CPU loads dominate, and two queries per lane share them: 12 instead of 23 ms. On a GPU more keys per step
    # mean fewer rescalings. Without subgroups, four keys take half a minute to compile on lavapipe.
    shapes = [(2, 1), (1, 1)] if capabilities.software else [(1, 4), (1, 1), (2, 1)]
    return [
        replace(lanes, rows=queries, span=keys)
        for lanes in _lanes(capabilities, c)
        for queries, keys in (shapes if lanes.subgroup else [(1, 1)])
    ]


def _spread(capabilities: Capabilities, c: Any, kernel: str) -> list[Tiling]:
    size = capabilities.subgroup_size
    if size < 4:
        return []
    import os
    shapes = [tuple(map(int, s.split("x"))) for s in os.environ.get("SPREAD", "8x2,8x1,4x2").split(",")]
    found = [Tiling("spread", size, rows=r, span=b) for r, b in shapes]
    if capabilities.int64 and capabilities.software:
        found = [replace(t, wide=True) for t in found] + found
    return found


def _forward(capabilities: Capabilities, c: Any) -> list[Tiling]:
    return _spread(capabilities, c, "") + _lanes_and_tile(capabilities, c)


def _backward(capabilities: Capabilities, c: Any) -> list[Tiling]:
    return _spread(capabilities, c, "") + _lanes(capabilities, c)


def _held(c: Any) -> int:
    return c.tile.rows * (1 if c.tile.family == "spread" else c.tile.lanes)


def _over_queries(c: Any) -> tuple[int, int, int]:
    return cdiv(c.rows * c.group, _held(c)), c.kv_heads, 1


@dataclass(frozen=True)
class AttentionTuning:
    """Inputs are one causal sequence of the call's size, whose last rows are the queries."""

    sizes: tuple[str, ...] = ("rows", "keys")
    batch: tuple[str, ...] = ("rows", "keys")

    def work(self, c: Constants) -> float:
        """Multiply-adds of the scores if every query saw all keys."""
        keys = c["keys"] if "keys" in c else c["rows"]
        return float(c["rows"] * keys * c["kv_heads"] * c["group"] * c["dim"])

    def cut(self, c: Constants, tiling: Tiling) -> Constants:
        rows = part.fewer(c["rows"], lcm(CHECKED, tiling.lanes * tiling.rows))
        return c | {"rows": rows} | ({"keys": rows + part.fewer(c["keys"] - c["rows"], CHECKED)} if "keys" in c else {})

    def inputs(self, c: Constants, present: tuple[str, ...], rng: np.random.Generator) -> Arrays:
        rows, heads = c["rows"], c["kv_heads"] * c["group"]
        keys = c.get("keys", rows)
        last = np.arange(1, rows + 1) + (keys - rows)
        ranges = np.stack([np.zeros(rows), last, np.full(rows, rows), np.zeros(rows)], axis=1)
        stats = np.stack([np.full((rows, heads), 4.0), np.zeros((rows, heads))], axis=2)
        shapes = {
            **dict.fromkeys(("q", "y", "dy", "dq"), (rows, heads, c["dim"])),
            **dict.fromkeys(("k", "v", "dk", "dv"), (keys, c["kv_heads"], c["dim"])),
            "lse": (rows, heads),
        }
        arrays = {name: stored(rng, "f32", *shape) for name, shape in shapes.items() if name in present}
        arrays |= {"stats": stats.astype(np.float32), "ranges": ranges.astype(np.uint32)}
        return {name: arrays[name] for name in present}


TUNING = AttentionTuning()
HELD = 16  # copies of the scores that a reference holds, approximately


def some_queries(arrays: Arrays, c: Constants) -> part.Part | None:
    if not part.costly(HELD * TUNING.work(c), {}):
        return None
    rows = part.picks(c["rows"], part.ROWS)
    return part.some_rows(arrays, "q y dy dq lse stats ranges", c["rows"], rows), {**c, "rows": rows.size}


def one_head(arrays: Arrays, c: Constants) -> part.Part | None:
    """A part with the first key head and its query heads."""
    if not part.costly(HELD * TUNING.work(c), {}):
        return None
    rows, heads = c["rows"], c["kv_heads"]
    kept = {n: a if n == "ranges" else a.reshape(rows, heads, -1)[:, 0] for n, a in arrays.items()}
    return kept, {**c, "kv_heads": 1}


def _weights(
    q: Any, k: Any, ranges: Any, rows: int, keys: int, kv_heads: int, group: int, dim: int, scale: float
) -> Any:
    """(q [h, g, t, d], k [h, s, d], scores, seen [t, s]) in float64."""
    q = q.reshape(rows, kv_heads, group, dim).transpose(1, 2, 0, 3)
    k = k.reshape(keys, kv_heads, dim).transpose(1, 0, 2)
    scores = scale * np.einsum("hgtd,hsd->hgts", q, k)
    bounds = ranges.reshape(rows, 4).astype(int)
    column = np.arange(keys)
    seen = (column >= bounds[:, :1]) & (column < bounds[:, 1:2])
    return q, k, np.where(seen, scores, -np.inf), seen


def _rows_first(x: np.ndarray) -> np.ndarray:
    return x.transpose(2, 0, 1, 3)


@kernel("attention_forward.wgsl.j2", grid=_over_queries, variants=_forward, tuning=TUNING, part=some_queries)
def attention_forward(
    q: In,
    k: In,
    v: In,
    ranges: Fixed,
    y: Out,
    lse: Out,
    *,
    rows: Dim,
    keys: Dim,
    kv_heads: U32,
    group: U32,
    dim: U32,
    scale: F32,
) -> Any:
    """y[t] = sum_j softmax_j(scale q[t] k[j]) v[j] over the keys ranges[t].xy, and the softmax's log-sum-exp.

    Rows with an empty range give zeros."""
    _, _, scores, _ = _weights(q, k, ranges, rows, keys, kv_heads, group, dim, scale)
    top = np.maximum(scores.max(axis=-1, keepdims=True), LOWEST)
    lse = top + np.log(np.maximum(np.exp(scores - top).sum(axis=-1, keepdims=True), 1e-38))
    y = np.einsum("hgts,hsd->hgtd", np.exp(scores - lse), v.reshape(keys, kv_heads, dim).transpose(1, 0, 2))
    return _rows_first(y), _rows_first(lse)


@kernel("attention_stats.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def attention_stats(y: In, dy: In, lse: In, stats: Out, *, rows: U32, dim: U32) -> Any:
    """stats[i] = (lse[i], dy[i] · y[i])."""
    return np.stack([lse.reshape(-1), (y * dy).reshape(rows, dim).sum(axis=1)], axis=1)


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
) -> Any:
    qs, ks, scores, _ = _weights(q, k, ranges, rows, keys, kv_heads, group, dim, scale)
    stats = stats.reshape(rows, kv_heads, group, 2).transpose(1, 2, 0, 3)
    p = np.exp(scores - stats[..., :1])
    dys = dy.reshape(rows, kv_heads, group, dim).transpose(1, 2, 0, 3)
    dp = np.einsum("hgtd,hsd->hgts", dys, v.reshape(keys, kv_heads, dim).transpose(1, 0, 2))
    return qs, ks, dys, p, scale * p * (dp - stats[..., 1:])


@kernel("attention_backward_q.wgsl.j2", grid=_over_queries, variants=_backward, tuning=TUNING, part=some_queries)
def attention_backward_q(
    q: In,
    k: In,
    v: In,
    dy: In,
    stats: In,
    ranges: Fixed,
    dq: Out,
    *,
    rows: Dim,
    keys: Dim,
    kv_heads: U32,
    group: U32,
    dim: U32,
    scale: F32,
) -> Any:
    """dq = ds k, with ds = scale p (dy · v - delta) and p = exp(s - lse)."""
    _, ks, _, _, ds = _score_gradients(q, k, v, dy, stats, ranges, rows, keys, kv_heads, group, dim, scale)
    return _rows_first(np.einsum("hgts,hsd->hgtd", ds, ks))


@kernel(
    "attention_backward_kv.wgsl.j2",
    grid=lambda c: (cdiv(c.rows, _held(c)), c.kv_heads, 1),
    variants=_backward,
    tuning=TUNING,
    part=one_head,
)
def attention_backward_kv(
    q: In,
    k: In,
    v: In,
    dy: In,
    stats: In,
    ranges: Fixed,
    dk: Out,
    dv: Out,
    *,
    rows: Dim,
    kv_heads: U32,
    group: U32,
    dim: U32,
    scale: F32,
) -> Any:
    """dk = ds^T q and dv = p^T dy, summed over the query heads that share a key head."""
    qs, _, dys, p, ds = _score_gradients(q, k, v, dy, stats, ranges, rows, rows, kv_heads, group, dim, scale)
    dk, dv = np.einsum("hgts,hgtd->shd", ds, qs), np.einsum("hgts,hgtd->shd", p, dys)
    return dk, dv


def attention(rec: Recorder, q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, kv_heads: int, scale: float) -> Tensor:
    """Attention of q [T, heads, dim] over k and v [S, kv_heads, dim]. Training requires S = T.

    ranges [T, 4] u32: first key, one past the last key, one past the last query that sees key t, unused.
    """
    rows, dim = q.shape[0], q.shape[2]
    shape: Shape = {"rows": rows, "kv_heads": kv_heads, "group": q.shape[1] // kv_heads, "dim": dim, "scale": scale}
    y, lse = rec.temp(q.shape, name="attended"), rec.temp(q.shape[:2], name="lse")
    rec.dispatch(attention_forward, q, k, v, ranges, y, lse, keys=k.shape[0], **shape)

    def backward() -> None:
        dy, stats = rec.gradient(y), rec.temp((*q.shape[:2], 2), name="stats")
        rec.dispatch(attention_stats, y, dy, lse, stats, rows=rows * q.shape[1], dim=dim)
        dq, dk, dv = rec.new_gradient(q), rec.new_gradient(k), rec.new_gradient(v)
        rec.dispatch(attention_backward_q, q, k, v, dy, stats, ranges, dq, keys=k.shape[0], **shape)
        rec.dispatch(attention_backward_kv, q, k, v, dy, stats, ranges, dk, dv, **shape)

    rec.node(backward, inputs=[q, k, v], outputs=[y])
    return y
