"""Rotary position embedding (Su et al. 2021) in the half-split form of Hugging Face checkpoints, of q and k together.

Models may rotate only the first values of each head. With weights, each head is normalised first (RMSNorm over its
dimension, as in Qwen3), in the same dispatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Dim, In, InOut, ReadOnly, by_subgroup, kernel, linear_grid, row_grid
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.recorder import Recorder

NOWHERE = 0xFFFFFFFF


def _turned(x: np.ndarray, positions: np.ndarray, table: np.ndarray, rotated: int, sign: float = 1.0) -> np.ndarray:
    """x [rows, heads, dim] with each pair (i, i + rotated / 2) rotated by sign * its angle at the row's position."""
    if not rotated:
        return x
    angle = table.reshape(-1, rotated // 2, 2)[positions.astype(int)]
    cos, sin = angle[:, None, :, 0], sign * angle[:, None, :, 1]
    a, b, tail = np.split(x, [rotated // 2, rotated], axis=2)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, tail], axis=2)


def _region(flat: np.ndarray, first: int, *shape: int) -> np.ndarray:
    """A view of some values of a storage."""
    return flat.reshape(-1)[first : first + math.prod(shape)].reshape(shape)


def _scatter(new: np.ndarray, rows_of: np.ndarray, cache: np.ndarray) -> np.ndarray:
    """The cache with new[t] at row rows_of[t], unless that is NOWHERE."""
    result, index = cache.reshape(-1, new.shape[1] * new.shape[2]).copy(), rows_of.reshape(-1).astype(np.int64)
    mask = index != NOWHERE
    result[index[mask]] = new.reshape(len(new), -1)[mask]
    return result


PER_HEAD = row_grid(lambda c: c.rows * (c.heads + c.kv_heads))


@kernel("rope_forward.wgsl.j2", grid=PER_HEAD, variants=by_subgroup)
def rope_forward(
    x: InOut,
    positions: ReadOnly,
    table: ReadOnly,
    q_weight: ReadOnly = None,
    k_weight: ReadOnly = None,
    y: InOut = None,
    cache_k: InOut = None,
    cache_v: InOut = None,
    rows_of: ReadOnly = None,
    *,
    rows: Dim,
    heads: U32,
    kv_heads: U32,
    dim: U32,
    rotated: U32,
    q_first: Dim,
    k_first: Dim,
    v_first: Dim = 0,
    yq_first: Dim = 0,
    yk_first: Dim = 0,
    eps: F32 = 0.0,
) -> Any:
    """The heads of q and k, normalised by their weights if there are any, with each pair (i, i + rotated / 2) of the
    first `rotated` values rotated by its angle table[positions[t]]; in x or, if they are bound, y. q, k and v are the
    values of x from *_first on. With rows_of, row t of k goes to row rows_of[t] of cache_k instead, and that of v to
    cache_v; 0xffffffff: nowhere."""
    x, y, result = x.copy(), None if y is None else y.copy(), []
    for count, weight, name in ((heads, q_weight, "q"), (kv_heads, k_weight, "k")):
        firsts = {"q": (q_first, yq_first), "k": (k_first, yk_first)}[name]
        region = _region(x, firsts[0], rows, count, dim)
        normed = region if weight is None else region / np.sqrt((region**2).mean(axis=2, keepdims=True) + eps) * weight
        turned = _turned(normed, positions, table, rotated)
        if name == "k" and rows_of is not None:
            result = [
                _scatter(turned, rows_of, cache_k),
                _scatter(_region(x, v_first, *region.shape), rows_of, cache_v),
            ]
        elif y is None:
            region[:] = turned
        else:
            _region(y, firsts[1], *region.shape)[:] = turned
    return (x, *([] if y is None else [y]), *result)


@kernel("rope_backward.wgsl.j2", grid=PER_HEAD, variants=by_subgroup)
def rope_backward(
    dy: InOut,
    positions: ReadOnly,
    table: ReadOnly,
    x: In = None,
    q_weight: ReadOnly = None,
    k_weight: ReadOnly = None,
    dx: InOut = None,
    *,
    rows: Dim,
    heads: U32,
    kv_heads: U32,
    dim: U32,
    rotated: U32,
    q_first: Dim,
    k_first: Dim,
    yq_first: Dim,
    yk_first: Dim,
    eps: F32 = 0.0,
) -> Any:
    """The gradients by q and k of `rope_forward`: dy rotated back, in place; with weights, dx = rstd (g - x rstd^2
    mean(g x)) with g = dy * weight. q and k are the values of x and dx from *_first on, of dy from y*_first on."""
    dy, dx = dy.copy(), None if dx is None else dx.copy()
    for count, weight, first, y_first in (
        (heads, q_weight, q_first, yq_first),
        (kv_heads, k_weight, k_first, yk_first),
    ):
        region = _region(dy, y_first, rows, count, dim)
        back = _turned(region, positions, table, rotated, -1.0)
        if dx is None:
            region[:] = back
            continue
        of, g = _region(x, first, *region.shape), back * weight
        rstd = 1 / np.sqrt((of**2).mean(axis=2, keepdims=True) + eps)
        _region(dx, first, *region.shape)[:] = rstd * (g - of * rstd**2 * (g * of).mean(axis=2, keepdims=True))
    return dy if dx is None else (dy, dx)


@kernel("store_halves.wgsl", grid=lambda c: linear_grid(c.rows * (c.cols // 2)), lib=("linear", "half"))
def store_halves(x: In, rows_of: ReadOnly, cache: InOut, *, rows: Dim, cols: U32, first: Dim) -> Any:
    """cache[rows_of[t]] = x[first + cols t ...] rounded to f16, at most 65504 in size; 0xffffffff: nowhere."""
    new = np.clip(_region(x, first, rows, 1, cols), -65504, 65504).astype(np.float16)
    return _scatter(new.astype(np.float64), rows_of, cache)


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm of each head of q and of k, before they are rotated. Weights f32 [dim]."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True)
class Appending:
    """Where rotated keys and values go in generation: the caches [rows, kv_heads, dim], f32 or f16, and each token's
    row."""

    keys: Tensor
    values: Tensor
    rows: Tensor


def rope(
    rec: Recorder,
    qkv: tuple[Tensor, Tensor, Tensor],
    positions: Tensor,
    table: Tensor,
    norm: HeadNorm | None = None,
    cache: Appending | None = None,
    turns: bool = True,
    query_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates q [T, heads, dim] and k [T, kv_heads, dim], normalised first if `norm` is given; returns q, k and v.

    Without a norm, and in generation, they are rotated in place. With a cache, keys and values are stored there,
    and the caches returned.

    Args:
        qkv: regions of one storage, or in a storage each, but with a cache k and v in one; without any other use.
        positions: u32 [T].
        table: f32 [positions, rotated / 2, 2], cos and sin; the other dim - rotated values of a head are not rotated.
        turns: whether any are, as in all layers but those without positions.
        query_table: that of q, if it is another one; without a norm.
    """
    q, k, v = qkv
    if not (turns or norm or cache):
        return q, k, v
    separate = query_table is not None
    if query_table is not None:
        assert norm is None, "queries with a table of their own are not normalised"
        (q,) = _rotated(rec, q, None, positions, query_table, None, turns)
    if cache:
        assert k.storage is v.storage, "k and v are in different storages"
        together = not separate and q.storage is k.storage
        if not (separate or together):
            _rotated(rec, q, None, positions, table, norm, turns)
        shape = _shape(q if together else None, k, table, norm, turns)
        if cache.keys.dtype == "f16":
            rec.dispatch(rope_forward, _whole(k), positions, table, *_weights(norm), **shape)
            for new, target in ((k, cache.keys), (v, cache.values)):
                cols = k.shape[1] * k.shape[2]
                rec.dispatch(
                    store_halves, _whole(new), cache.rows, target, rows=k.shape[0], cols=cols, first=_first(new)
                )
            return q, cache.keys, cache.values
        stored_in = (None, cache.keys, cache.values, cache.rows)
        shape["v_first"] = v.byte_offset // 4
        rec.dispatch(rope_forward, _whole(k), positions, table, *_weights(norm), *stored_in, **shape)
        return q, cache.keys, cache.values
    if separate:
        (yk,) = _rotated(rec, None, k, positions, table, None, turns)
        return q, yk, v
    if q.storage is k.storage:
        yq, yk = _rotated(rec, q, k, positions, table, norm, turns)
    else:
        (yq,), (yk,) = (_rotated(rec, a, b, positions, table, norm, turns) for a, b in ((q, None), (None, k)))
    return yq, yk, v


def _rotated(
    rec: Recorder,
    q: Tensor | None,
    k: Tensor | None,
    positions: Tensor,
    table: Tensor,
    norm: HeadNorm | None,
    turns: bool,
) -> list[Tensor]:
    """q and k, or only one, in one storage."""
    parts = [part for part in (q, k) if part]
    x, shape, weights = _whole(parts[0]), _shape(q, k, table, norm, turns), _weights(norm)
    moves = norm is not None and rec.training  # the backward pass of the norm needs its input
    ys = rec.temps(*(part.shape for part in parts), name="rotated") if moves else parts
    y, firsts = _whole(ys[0]), {"yq_first": _first(q and ys[0]), "yk_first": _first(k and ys[-1])}

    def record(y: Tensor | None) -> None:
        rec.dispatch(rope_forward, x, positions, table, *weights, y, **firsts, **shape)

    record(y if moves else None)
    if moves:
        rec.cheap(y, record)

    def backward() -> None:
        if not moves:
            rec.dispatch(rope_backward, rec.gradient(y), positions, table, **firsts, **shape)
            return
        for part in parts:
            rec.gradient_target(part)
        inputs = (rec.gradient(y), positions, table, x, *weights)
        rec.dispatch(rope_backward, *inputs, rec.gradient(x), **firsts, **shape)

    rec.node(backward, inputs=parts[:1], outputs=ys[:1])
    return ys


def _shape(q: Tensor | None, k: Tensor | None, table: Tensor, norm: HeadNorm | None, turns: bool) -> dict[str, Any]:
    rows, _, dim = (q or k).shape  # type: ignore[union-attr]
    heads = {"heads": q.shape[1] if q else 0, "kv_heads": k.shape[1] if k else 0}
    firsts = {"q_first": _first(q), "k_first": _first(k)}
    return {
        "rows": rows,
        "dim": dim,
        "rotated": 2 * table.shape[1] if turns else 0,
        **heads,
        **firsts,
        "eps": norm.eps if norm else 0.0,
    }


def _weights(norm: HeadNorm | None) -> tuple[Tensor | None, Tensor | None]:
    return (norm.q, norm.k) if norm else (None, None)


def _first(part: Tensor | None) -> int:
    return part.byte_offset // 4 if part else 0


def _whole(part: Tensor) -> Tensor:
    return Tensor((part.storage.nbytes // 4,), part.dtype, part.storage, name=part.name)
