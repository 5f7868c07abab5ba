"""Gated delta nets over few rows, as when each sequence of a batch gets a token: two dispatches instead of thirteen.

For each row, with S the state of a value head before it (see `ops.attention.delta_net.delta_rule`):

    u = beta (v - exp(g) S^T k)    y = exp(g) S^T q + (k . q) u    S <- exp(g) S + k u^T

S is read once and stays in registers between its products and its update. Rows of a sequence are computed one after
another, so prompts are better computed in chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Dim, In, InOut, Out, ReadOnly, cdiv, kernel, linear_grid
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.gpu.tiling import Capabilities, Tiling
from wgpu_lora.ops.attention.delta_net.causal_conv import NOWHERE, causal_conv_forward, causal_conv_state
from wgpu_lora.ops.recorder import Recorder

LANES, HELD = 256, 32  # lanes of a workgroup, and rows of four columns that a lane holds, at most


def padded(heads: int) -> int:
    return 4 * cdiv(heads, 4)


@kernel(
    "delta/inputs.wgsl",
    grid=lambda c: linear_grid(c.rows * (c.cols + padded(c.heads))),
    lib=("linear", "logistic"),
)
def delta_inputs(
    runs: ReadOnly,
    x: In,
    weight: ReadOnly,
    state: InOut,
    a: In,
    a_log: ReadOnly,
    dt_bias: ReadOnly,
    y: Out,
    *,
    rows: Dim,
    cols: U32,
    heads: U32,
    taps: U32,
) -> Any:
    """y[t] = the convolved inputs, then the heads' decays exp(-exp(a_log) softplus(a + dt_bias)), and zeros up to a
    multiple of 4.

    state: as in `causal_conv_state`, which it replaces."""
    shape: dict[str, Any] = {"rows": rows, "cols": cols, "taps": taps}
    one_part: dict[str, Any] = {"q_first": 0, "k_first": 0, "v_first": 0, "key_cols": 0}
    mixed = causal_conv_forward(runs, x, weight, state, np.zeros(rows * cols), **shape, **one_part)
    decays = np.exp(-np.exp(a_log) * np.logaddexp(0, a.reshape(rows, heads) + dt_bias))
    zeros = np.zeros((rows, padded(heads) - heads))
    result = np.concatenate([mixed.reshape(rows, cols), decays, zeros], axis=1)
    return causal_conv_state(runs, x, state, **shape), result


def possible_slices(key_dim: int, value_dim: int) -> list[int]:
    """Into how many slices the rows of a state may be divided, whose lanes have four columns each."""
    result = (n for n in (8, 4, 2, 1) if key_dim // 4 % n == 0)
    return [n for n in result if value_dim // 4 * n <= LANES and key_dim // n <= HELD]


def slices(capabilities: Capabilities, c: Any) -> list[Tiling]:
    """As many slices as possible on GPUs, and as few on CPUs, which compute a workgroup's lanes in turn."""
    counts = possible_slices(c.key_dim, c.value_dim)
    if capabilities.software:
        counts = counts[::-1]
    return [Tiling(lanes=c.value_dim // 4 * n, slices=n) for n in counts]


@kernel(
    "delta/tokens.wgsl.j2", grid=lambda c: linear_grid(c.rows * c.value_heads, 1), lib=("logistic",), variants=slices
)
def delta_tokens(
    runs: ReadOnly,
    x: In,
    b: In,
    state: InOut,
    gate: In,
    weight: ReadOnly,
    y: Out,
    *,
    rows: Dim,
    key_heads: U32,
    value_heads: U32,
    key_dim: U32,
    value_dim: U32,
    scale: F32,
    eps: F32,
    norm_eps: F32,
) -> Any:
    """y = weight * o / rms(o) * silu(gate), with the delta rule's outputs o for q and k normalised and q scaled.

    x: of `delta_inputs`. state: [sequences, value_heads, key_dim, value_dim], before and after."""
    keys, heads = key_heads * key_dim, (rows, value_heads, value_dim)
    cols = 2 * keys + value_heads * value_dim
    q, k, v, decay, _ = np.split(x.reshape(rows, -1), (keys, 2 * keys, cols, cols + value_heads), axis=1)
    q, k = (z.reshape(rows, key_heads, key_dim).repeat(value_heads // key_heads, axis=1) for z in (q, k))
    q, k = (z / np.sqrt((z**2).sum(axis=2, keepdims=True) + eps) for z in (q, k))
    v, gate, out = v.reshape(heads), gate.reshape(heads), np.zeros(heads)
    beta = 1 / (1 + np.exp(-b.reshape(rows, value_heads)))
    states = state.reshape(-1, value_heads, key_dim, value_dim).copy()
    for t, (before, _, sequence, goes_on) in enumerate(runs.reshape(-1, 4).astype(np.int64)):
        if not before:
            now = states[sequence] if goes_on else np.zeros(states.shape[1:])
        now = decay[t, :, None, None] * now
        u = beta[t, :, None] * (v[t] - np.einsum("hdc,hd->hc", now, k[t]))
        now = now + np.einsum("hd,hc->hdc", k[t], u)
        out[t] = scale * np.einsum("hdc,hd->hc", now, q[t])
        if sequence != NOWHERE:
            states[sequence] = now
    norms = np.sqrt((out**2).mean(axis=2, keepdims=True) + norm_eps)
    return states, weight * out / norms * gate / (1 + np.exp(-gate))


def gated_delta_step(
    rec: Recorder,
    x: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    frozen: tuple[Tensor, Tensor, Tensor, Tensor],
    runs: Tensor,
    inputs: Tensor,
    state: Tensor,
    key_heads: int,
    eps: float,
    norm_eps: float,
) -> Tensor:
    """`causal_conv`, `l2norm`, `gated_delta_rule` and `gated_norm` one after another, for a token of generation.

    Args:
        x: f32 [T, cols], of q, k and v. z: f32 [T, value_heads * value_dim]. a, b: f32 [T, value_heads].
        frozen: the convolution's weight, a_log, dt_bias and the norm's weight.
        runs: u32 [T, 4], see `ops.attention.delta_net.delta_chunks`.
        inputs, state: of the sequences, as in `causal_conv` and `gated_delta_rule`; read and replaced.

    Returns:
        f32 [T, value_heads * value_dim].
    """
    weight, a_log, dt_bias, norm = frozen
    (rows, cols), (_, heads, key_dim, value_dim) = x.shape, state.shape
    mixed = rec.temp((rows, cols + padded(heads)), name="convolved and decays")
    sizes: dict[str, Any] = {"rows": rows, "cols": cols, "heads": heads, "taps": weight.size // cols}
    rec.dispatch(delta_inputs, runs, x, weight, inputs, a, a_log, dt_bias, mixed, **sizes)
    y = rec.temp(z.shape, name="gated")
    of_heads = {"key_heads": key_heads, "value_heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    scales = {"scale": key_dim**-0.5, "eps": eps, "norm_eps": norm_eps}
    rec.dispatch(delta_tokens, runs, mixed, b, state, z, norm, y, rows=rows, **of_heads, **scales)
    return y
