"""Cases of the kernels around the gated delta rule: its convolution, norms and gates, and the gates of attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.kernels import Arrays, add, normal, poison
from support.kernels.delta import KEPT, ROWS, RUNS, without
from wgpu_lora.ops import norm
from wgpu_lora.ops.attention import attention_gate
from wgpu_lora.ops.attention.delta_net import causal_conv

COLS, KEY_COLS = 13, 3
PARTS: dict[str, Any] = {"rows": ROWS, "cols": COLS, "taps": 4}
PLACES = {"q_first": 2, "k_first": 2 + ROWS * KEY_COLS, "v_first": 5 + 2 * ROWS * KEY_COLS, "key_cols": KEY_COLS}
SIZE = ROWS * COLS + 8


def forward(rng: np.random.Generator) -> Arrays:
    return {"runs": RUNS, "x": normal(rng, ROWS, COLS), "weight": normal(rng, COLS, 1, 4), "y": normal(rng, SIZE)}


def cached(rng: np.random.Generator) -> Arrays:
    state = normal(rng, 5, 3, COLS)
    state[1] = np.nan  # a sequence that begins
    return {**forward(rng), "runs": KEPT, "state": state}


def slope(rng: np.random.Generator) -> Arrays:
    return {**without(forward, "y")(rng), "dy": normal(rng, SIZE), "dpre": poison(ROWS, COLS)}


def backward(rng: np.random.Generator) -> Arrays:
    return {**without(forward, "x", "y")(rng), "dpre": normal(rng, ROWS, COLS), "dx": poison(ROWS, COLS)}


add(causal_conv.causal_conv_forward, forward, **PARTS, **PLACES)
add(causal_conv.causal_conv_forward, cached, note="cached", **PARTS, **PLACES)
add(causal_conv.causal_conv_slope, slope, **PARTS, **PLACES)
add(causal_conv.causal_conv_backward, backward, **PARTS)
add(causal_conv.causal_conv_state, without(cached, "weight", "y"), **PARTS)

NORM: dict[str, Any] = {"rows": 67, "cols": 37}
for scale in (1.0, 0.25):
    add(
        norm.l2norm_forward,
        lambda rng: {"x": normal(rng, 67, 37), "y": poison(67, 37)},
        **NORM,
        scale=scale,
        eps=1e-3,
    )
add(
    norm.l2norm_backward,
    lambda rng: {"x": normal(rng, 67, 37), "dy": normal(rng, 67, 37), "dx": poison(67, 37)},
    **NORM,
    scale=0.25,
    eps=1e-3,
)


def gated(rng: np.random.Generator) -> Arrays:
    inputs = {"x": normal(rng, 67, 37), "gate": 4 * normal(rng, 67, 37)}
    return {**inputs, "weight": normal(rng, 37), "y": poison(67, 37)}


def gated_backward(rng: np.random.Generator) -> Arrays:
    grads = {"dy": normal(rng, 67, 37), "dx": poison(67, 37), "dgate": poison(67, 37)}
    return {**without(gated, "y")(rng), **grads}


add(norm.gated_norm_forward, gated, **NORM, eps=1e-3)
add(norm.gated_norm_backward, gated_backward, **NORM, eps=1e-3)

HEADS: dict[str, Any] = {"size": 35 * 6, "dim": 6}


def head(rng: np.random.Generator) -> Arrays:
    arrays = {"x": normal(rng, 35, 6), "gates": 4 * normal(rng, 35, 2, 6), "dy": normal(rng, 35, 6)}
    return {**arrays, "y": poison(35, 6), "dx": poison(35, 6), "dgates": normal(rng, 35, 2, 6)}


add(attention_gate.gate_forward, without(head, "dy", "dx", "dgates"), **HEADS)
add(attention_gate.gate_backward, without(head, "y"), **HEADS)
