"""Kernels of the gated delta rule within chunks of 64 rows, for all chunks and heads at once.

Arrays have the rows of all key heads, or of all value heads, or of the `heads` value heads from `first` on: 'key',
'value' and 'block'. A value head j uses the key head j // (value_heads / key_heads). runs: u32 [T, 4], for each row how
many rows of its sequence are before it in the batch, and how many from it on; the sequence's state, if it has one, or
NOWHERE; and whether that is the state before the first of these rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import (
    U32,
    Dim,
    Flag,
    Grid,
    In,
    InOut,
    Offset,
    Out,
    ReadOnly,
    Word,
    by_subgroup,
    cdiv,
    kernel,
    linear_grid,
    row_grid,
)
from wgpu_lora.gpu.tiling import Capabilities, Tiling

CHUNK = 64


def tiles(capabilities: Capabilities, c: Any) -> list[Tiling]:
    return [Tiling(rows=4)]


def over_chunks(columns: Callable[[Any], int], per_chunk: bool = True) -> Callable[[Any], Grid]:
    """A lane for four columns of each head, in every chunk or going through all of them."""

    def grid(c: Any) -> Grid:
        return cdiv(c.heads * columns(c) // 4, c.tile.lanes), cdiv(c.rows, CHUNK) if per_chunk else 1, 1

    return grid


def pieces(runs: np.ndarray, rows: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of the rows that are in the same chunk and belong to the same sequence."""
    start = 0
    for t in range(1, rows + 1):
        if t == rows or t % CHUNK == 0 or runs.reshape(-1, 4)[t, 0] == 0:
            yield start, t
            start = t


def block(first: int, heads: int, value_heads: int, key_heads: int = 0) -> dict[str, int]:
    """Which value heads a call is about."""
    return {"first": first, "heads": heads, "value_heads": value_heads, "key_heads": key_heads}


def of_block(x: np.ndarray, of: str, rows: int, c: Mapping[str, Any]) -> np.ndarray:
    """[rows, heads, dim] of the block's value heads."""
    if of == "block":
        return x.reshape(rows, c["heads"], -1)
    if of == "value":
        return x.reshape(rows, c["value_heads"], -1)[:, c["first"] : c["first"] + c["heads"]]
    index = (c["first"] + np.arange(c["heads"])) * c["key_heads"] // c["value_heads"]
    return x.reshape(rows, c["key_heads"], -1)[:, index]


def scalars(x: np.ndarray | None, rows: int, c: Mapping[str, Any]) -> np.ndarray:
    """[rows, heads, 1] of the block's value heads; ones if there are none."""
    return np.ones((rows, c["heads"], 1)) if x is None else of_block(x, "value", rows, c)


def lower(n: int, strict: bool = False) -> np.ndarray:
    return np.tril(np.ones((n, n), bool), -1 if strict else 0)


@kernel("delta/pairs.wgsl.j2", grid=over_chunks(lambda c: CHUNK), variants=tiles)
def delta_pairs(
    runs: ReadOnly,
    x: In,
    y: In = None,
    x2: In = None,
    y2: In = None,
    decay: In = None,
    beta: In = None,
    c: Out = None,
    *,
    rows: Dim,
    first: Offset[Dim],
    heads: U32,
    key_heads: U32,
    value_heads: U32,
    dim: U32,
    dim2: U32 = 0,
    x_of: Word,
    y_of: Word,
    x2_of: Word = "block",
    y2_of: Word = "block",
    strict: Flag = False,
    negative: Flag = False,
) -> Any:
    """c[i, h, j] = sign beta[i] (x[i] · y[j] + x2[i] · y2[j]) exp(decay[i] - decay[j]) for the rows j <= i, or j < i,
    of i's chunk and sequence, at their places in the chunk; else 0. Without y, it is x."""
    of = block(first, heads, value_heads, key_heads)
    pairs = [(of_block(x, x_of, rows, of), of_block(x if y is None else y, y_of, rows, of))]
    if x2 is not None:
        pairs.append((of_block(x2, x2_of, rows, of), of_block(y2, y2_of, rows, of)))
    decays, betas, result = scalars(decay, rows, of), scalars(beta, rows, of), np.zeros((rows, heads, CHUNK))
    for start, stop in pieces(runs, rows):
        piece, at = slice(start, stop), start % CHUNK
        dots = sum(np.einsum("ihd,jhd->hij", a[piece], b[piece]) for a, b in pairs)
        ratio = decays[piece, None, :, 0] - decays[None, piece, :, 0]
        mask = lower(stop - start, strict)[..., None]
        value = np.where(mask, dots.transpose(1, 2, 0) * np.exp(np.where(mask, ratio, 0)), 0) * betas[piece, None, :, 0]
        result[piece, :, at : at + stop - start] = (-value if negative else value).transpose(0, 2, 1)
    return result


@kernel("delta/inverse.wgsl.j2", grid=over_chunks(lambda c: CHUNK), variants=tiles)
def delta_inverse(
    runs: ReadOnly, m: In, t: Out, *, rows: Dim, first: Offset[Dim], heads: U32, key_heads: U32, value_heads: U32
) -> Any:
    """t = (I + m)^-1 for the strictly lower triangular m of each chunk, sequence and head, as `delta_pairs` has
    them."""
    result, m = np.zeros((rows, heads, CHUNK)), m.reshape(rows, heads, CHUNK)
    for start, stop in pieces(runs, rows):
        at = slice(start % CHUNK, start % CHUNK + stop - start)
        inverse = np.linalg.inv(np.eye(stop - start) + m[start:stop, :, at].transpose(1, 0, 2))
        result[start:stop, :, at] = inverse.transpose(1, 0, 2)
    return result


@kernel("delta/mix.wgsl.j2", grid=over_chunks(lambda c: c.dim), variants=tiles)
def delta_mix(
    runs: ReadOnly,
    a: In,
    x: In,
    beta: In = None,
    decay: In = None,
    y: InOut = None,
    *,
    rows: Dim,
    first: Offset[Dim],
    heads: U32,
    key_heads: U32,
    value_heads: U32,
    dim: U32,
    x_of: Word,
    y_of: Word,
    transposed: Flag = False,
    accumulate: Flag = False,
) -> Any:
    """y[i] (+)= sum_j a[i, j] s[j] x[j], or, transposed, y[j] (+)= sum_i a[i, j] s[i] x[i], over the rows of the same
    chunk and sequence, with s = beta exp(decay), of which either may be left out."""
    of = block(first, heads, value_heads, key_heads)
    scale = scalars(beta, rows, of) * (1 if decay is None else np.exp(scalars(decay, rows, of)))
    x, a, result = of_block(x, x_of, rows, of) * scale, a.reshape(rows, heads, CHUNK), y.copy()
    value = of_block(result, y_of, rows, of)  # a view
    for start, stop in pieces(runs, rows):
        matrix = a[start:stop, :, start % CHUNK : start % CHUNK + stop - start]
        mixed = np.einsum("jhi,jhd->ihd" if transposed else "ihj,jhd->ihd", matrix, x[start:stop])
        value[start:stop] = value[start:stop] + mixed if accumulate else mixed
    return result


@kernel("delta/scaled.wgsl.j2", grid=lambda c: linear_grid(c.rows * c.heads * c.dim), lib=("linear",))
def delta_scaled(
    x: In,
    beta: In,
    decay: In = None,
    y: InOut = None,
    *,
    rows: Dim,
    first: Offset[Dim],
    heads: U32,
    value_heads: U32,
    dim: U32,
    y_of: Word,
) -> Any:
    """y = beta exp(decay) x, of the heads of a block; decay may be left out."""
    of, result = block(first, heads, value_heads), y.copy()
    scale = scalars(beta, rows, of) * (1 if decay is None else np.exp(scalars(decay, rows, of)))
    of_block(result, y_of, rows, of)[:] = x.reshape(rows, heads, dim) * scale
    return result


@kernel("delta/group_sum.wgsl.j2", grid=lambda c: linear_grid(c.rows * c.heads * c.dim), lib=("linear",))
def delta_group_sum(
    x: In,
    x2: In = None,
    y: InOut = None,
    *,
    rows: Dim,
    first: Offset[Dim],
    heads: U32,
    key_heads: U32,
    value_heads: U32,
    dim: U32,
) -> Any:
    """y[t, k] = the sum of x[t, h] (+ x2[t, h]) over the value heads h of key head k, of the heads of a block."""
    group, result = value_heads // key_heads, y.copy()
    total = x if x2 is None else x + x2
    of_key = slice(first // group, (first + heads) // group)
    result.reshape(rows, key_heads, dim)[:, of_key] = total.reshape(rows, -1, group, dim).sum(axis=2)
    return result


@kernel("delta/sums.wgsl.j2", grid=row_grid(lambda c: c.rows * c.heads), variants=by_subgroup)
def delta_sums(
    qk: In,
    v: In,
    dq: In,
    dk: In,
    dk_behind: In,
    dv: In,
    sums: Out,
    *,
    rows: Dim,
    q_first: Dim,
    k_first: Dim,
    first: Offset[Dim],
    heads: U32,
    key_heads: U32,
    value_heads: U32,
    key_dim: U32,
    value_dim: U32,
) -> Any:
    """sums[t, h] = (q · dq + k · dk - k · dk_behind, k · dk + v · dv), the gradients by decay and by log beta. dk is by
    the k of the row itself, dk_behind by the k that later rows see."""
    of = block(first, heads, value_heads, key_heads)
    size = rows * key_heads * key_dim
    q, k = (of_block(qk[at : at + size], "key", rows, of) for at in (q_first, k_first))
    dq, dk, dk_behind = (of_block(x, "block", rows, of) for x in (dq, dk, dk_behind))
    own = (k * dk).sum(axis=2)
    values = (of_block(v, "value", rows, of) * of_block(dv, "value", rows, of)).sum(axis=2)
    return np.stack([(q * dq).sum(axis=2) + own - (k * dk_behind).sum(axis=2), own + values], axis=2)
