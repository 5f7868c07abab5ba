"""Kernels of the gated delta rule that go from chunk to chunk with the state, and its gates."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import (
    U32,
    Dim,
    Flag,
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
from wgpu_lora.ops.attention.delta_net.delta_chunks import CHUNK, block, of_block, over_chunks, pieces, scalars, tiles

NOWHERE = 0xFFFFFFFF


def _grid(c: Any) -> Any:
    """Without queries, all chunks at once."""
    return over_chunks(lambda c: c.value_dim, per_chunk=c.given)(c)


@kernel("delta/scan.wgsl.j2", grid=_grid, variants=tiles)
def delta_scan(
    runs: ReadOnly,
    u: In,
    w: In,
    states: InOut,
    v: Out,
    qk: In = None,
    decay: In = None,
    y: InOut = None,
    *,
    rows: Dim,
    q_first: Dim = 0,
    k_first: Dim = 0,
    sequences: Dim = 0,
    first: Offset[Dim],
    heads: U32,
    key_heads: U32,
    value_heads: U32,
    key_dim: U32,
    value_dim: U32,
    cached: Flag = False,
    given: Flag = False,
) -> Any:
    """v = u - w S and y = exp(decay) q S with the state S before the row's chunk, 0 if the sequence begins in the
    chunk; behind it S <- exp(total) S + sum_i exp(total - decay[i]) k[i]^T v[i], with the total decay of the chunk.

    states: S before each chunk, [chunks, heads, key_dim, value_dim]; cached: that of each sequence, before and after.
    given: the states are known, and v alone is computed."""
    of = block(first, heads, value_heads, key_heads)
    states = states.reshape(-1, heads, key_dim, value_dim).copy()
    u, w = (of_block(x, "block", rows, of) for x in (u, w))
    new = u.copy()
    if not given:
        size, decays, y = rows * key_heads * key_dim, scalars(decay, rows, of), y.copy()
        q, k = (of_block(qk[at : at + size], "key", rows, of) for at in (q_first, k_first))
        out = of_block(y, "value", rows, of)
    for start, stop in pieces(runs, rows):
        before, after, sequence, goes_on = (int(n) for n in runs.reshape(-1, 4)[start])
        piece, number = slice(start, stop), start // CHUNK
        state = np.zeros((heads, key_dim, value_dim))
        if before or (cached and goes_on):
            state = states[sequence if cached else number]
        new[piece] = u[piece] - np.einsum("ihd,hdc->ihc", w[piece], state)
        if given:
            continue
        out[piece] = np.einsum("ihd,hdc->ihc", q[piece], state) * np.exp(decays[piece])
        total = decays[stop - 1]
        state = np.exp(total)[:, None] * state + np.einsum(
            "ihd,ihc->hdc", k[piece] * np.exp(total - decays[piece]), new[piece]
        )
        if cached and sequence != NOWHERE:
            states[sequence] = state
        elif not cached and start + after > stop:
            states[number + 1] = state
    return (states, new) if given else (states, new, y)


@kernel("delta/scan_backward.wgsl.j2", grid=over_chunks(lambda c: c.value_dim, per_chunk=False), variants=tiles)
def delta_scan_backward(
    runs: ReadOnly,
    w: In,
    qk: In,
    decay: In,
    dy: In,
    dv: InOut,
    dstates: InOut,
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
    """From the last chunk to the first, with dS by the state behind it: dv += exp(total - decay) k dS, then dstates[n -
    1], by the state before chunk n, = exp(total) dS + sum_i exp(decay[i]) q[i]^T dy[i] - w[i]^T dv[i]."""
    of = block(first, heads, value_heads, key_heads)
    dstates = dstates.reshape(-1, heads, key_dim, value_dim).copy()
    size, decays, w = rows * key_heads * key_dim, scalars(decay, rows, of), of_block(w, "block", rows, of)
    q, k = (of_block(qk[at : at + size], "key", rows, of) for at in (q_first, k_first))
    dy, dv = of_block(dy, "value", rows, of), dv.reshape(rows, heads, value_dim).copy()
    for start, stop in reversed(list(pieces(runs, rows))):
        before, after = (int(n) for n in runs.reshape(-1, 4)[start, :2])
        piece, number, gradient = slice(start, stop), start // CHUNK, np.zeros((heads, key_dim, value_dim))
        total = decays[stop - 1]
        if start + after > stop:
            dv[piece] += np.einsum("ihd,hdc->ihc", k[piece] * np.exp(total - decays[piece]), dstates[number])
            gradient = np.exp(total)[:, None] * dstates[number]
        if before:
            gradient += np.einsum("ihd,ihc->hdc", q[piece] * np.exp(decays[piece]), dy[piece])
            dstates[number - 1] = gradient - np.einsum("ihd,ihc->hdc", w[piece], dv[piece])
    return dv, dstates


@kernel("delta/through.wgsl.j2", grid=over_chunks(lambda c: c.key_dim), variants=tiles)
def delta_through(
    runs: ReadOnly,
    x: In,
    states: In,
    decay: In = None,
    y: InOut = None,
    *,
    rows: Dim,
    first: Offset[Dim],
    heads: U32,
    key_heads: U32,
    value_heads: U32,
    key_dim: U32,
    value_dim: U32,
    x_of: Word,
    behind: Flag = False,
    negative: Flag = False,
    accumulate: Flag = False,
) -> Any:
    """y[i] (+)= sign f[i] x[i] S^T by the state S before i's chunk, with f = exp(decay) if decay is given, or behind
    it, with f = exp(total - decay); nothing for rows whose sequence begins in the chunk, or ends there."""
    of = block(first, heads, value_heads, key_heads)
    x, states = of_block(x, x_of, rows, of), states.reshape(-1, heads, key_dim, value_dim)
    result = y.reshape(rows, heads, key_dim) * (1 if accumulate else 0)
    if not accumulate:
        result = np.zeros(result.shape)
    for start, stop in pieces(runs, rows):
        before, after = (int(n) for n in runs.reshape(-1, 4)[start, :2])
        if start + after > stop if behind else before:
            value = np.einsum("ihc,hdc->ihd", x[start:stop], states[start // CHUNK])
            if decay is not None:
                decays = scalars(decay, rows, of)
                value = value * np.exp(decays[stop - 1] - decays[start:stop] if behind else decays[start:stop])
            result[start:stop] += -value if negative else value
    return result


@kernel("delta/flow.wgsl.j2", grid=row_grid(lambda c: c.rows), variants=by_subgroup)
def delta_flow(runs: ReadOnly, states: In, dstates: In, y: Out, *, rows: U32, heads: U32, cols: U32, last: U32) -> Any:
    """y[n, h] = the sum over the state behind chunk n < last times its gradient, 0 if no sequence goes on behind it."""
    goes_on = runs.reshape(-1, 4)[CHUNK - 1 : CHUNK * last : CHUNK, 1] > 1
    states, dstates = (x.reshape(-1, heads, cols) for x in (states, dstates))
    result = np.zeros((rows // heads, heads))
    products = (states[1 : last + 1] * dstates[:last]).sum(axis=2)
    result[:last][goes_on] = products[goes_on]
    return result


@kernel("delta/gates.wgsl.j2", grid=lambda c: linear_grid(cdiv(c.rows, CHUNK) * c.heads), lib=("linear", "logistic"))
def delta_gates(
    runs: ReadOnly, a: In, b: In, a_log: ReadOnly, dt_bias: ReadOnly, beta: Out, decay: Out, *, rows: Dim, heads: U32
) -> Any:
    """beta = sigmoid(b); decay = the sum of g = -exp(a_log) softplus(a + dt_bias) over the rows of the same chunk and
    sequence up to this one."""
    a, b = a.reshape(rows, heads), b.reshape(rows, heads)
    g = -np.exp(a_log) * np.logaddexp(0, a + dt_bias)
    for start, stop in pieces(runs, rows):
        g[start:stop] = g[start:stop].cumsum(axis=0)
    return 1 / (1 + np.exp(-b)), g


@kernel(
    "delta/gates_backward.wgsl.j2",
    grid=lambda c: linear_grid(cdiv(c.rows, CHUNK) * c.heads),
    lib=("linear", "logistic"),
)
def delta_gates_backward(
    runs: ReadOnly,
    a: In,
    a_log: ReadOnly,
    dt_bias: ReadOnly,
    sums: In,
    flow: In,
    da: InOut,
    *,
    rows: Dim,
    first: Offset[Dim],
    heads: U32,
    value_heads: U32,
) -> Any:
    """da = dg * -exp(a_log) sigmoid(a + dt_bias), with dg[i] = the sum of sums[..].x over the rows of the same chunk
    and sequence from i on, and the flow behind the chunk."""
    of = block(first, heads, value_heads)
    result, own_heads = da.copy(), slice(first, first + heads)
    decays, flow = sums.reshape(rows, heads, 2)[..., 0].copy(), flow.reshape(-1, heads)
    for start, stop in pieces(runs, rows):
        if start + int(runs.reshape(-1, 4)[start, 1]) > stop:
            decays[stop - 1] += flow[start // CHUNK]
        decays[start:stop] = decays[start:stop][::-1].cumsum(axis=0)[::-1]
    slope = -np.exp(a_log[own_heads]) / (1 + np.exp(-of_block(a, "value", rows, of)[..., 0] - dt_bias[own_heads]))
    of_block(result, "value", rows, of)[..., 0] = decays * slope
    return result


@kernel("delta/beta_gradient.wgsl.j2", grid=lambda c: linear_grid(c.rows * c.heads), lib=("linear", "logistic"))
def delta_beta_gradient(
    b: In, sums: In, db: InOut, *, rows: Dim, first: Offset[Dim], heads: U32, value_heads: U32
) -> Any:
    """db = sums[..].y (1 - sigmoid(b)): the gradient by log beta times its derivative."""
    of, result = block(first, heads, value_heads), db.copy()
    logs = sums.reshape(rows, heads, 2)[..., 1]
    of_block(result, "value", rows, of)[..., 0] = logs / (1 + np.exp(of_block(b, "value", rows, of)[..., 0]))
    return result
