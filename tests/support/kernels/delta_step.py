"""Cases of the gated delta rule from row to row, as in generation."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.kernels import Arrays, add, normal, poison
from support.kernels.delta import runs_of
from wgpu_lora.ops.attention.delta_net import delta_step

# A sequence that begins, one that goes on with several rows, one that has no rows, one of a row, and padding.
RUNS = runs_of(1, 5, 1, padding=2, states=(1, 3, 0), fresh=(1,))
ROWS, SEQUENCES = len(RUNS), 5
KEY_HEADS, HEADS, KEY, VALUE, TAPS = 2, 6, 8, 12, 4
COLS = 2 * KEY_HEADS * KEY + HEADS * VALUE


def state(rng: np.random.Generator, *shape: int) -> np.ndarray:
    values = normal(rng, SEQUENCES, *shape)
    values[1:3] = np.nan  # of a sequence that begins, and of none
    return values


def inputs(rng: np.random.Generator) -> Arrays:
    arrays = {"runs": RUNS, "x": normal(rng, ROWS, COLS), "weight": normal(rng, COLS, 1, TAPS)}
    arrays |= {"state": state(rng, TAPS - 1, COLS), "a": 12 * normal(rng, ROWS, HEADS)}
    arrays |= {"a_log": normal(rng, HEADS), "dt_bias": normal(rng, HEADS)}
    return {**arrays, "y": poison(ROWS, COLS + 8)}


def tokens(rng: np.random.Generator) -> Arrays:
    x = np.concatenate([normal(rng, ROWS, COLS), rng.random((ROWS, 8), np.float32)], axis=1)
    arrays = {"runs": RUNS, "x": x, "b": 4 * normal(rng, ROWS, HEADS), "state": state(rng, HEADS, KEY, VALUE)}
    arrays |= {"gate": 4 * normal(rng, ROWS, HEADS * VALUE), "weight": normal(rng, VALUE)}
    return {**arrays, "y": poison(ROWS, HEADS * VALUE)}


DIMS: dict[str, Any] = {"key_heads": KEY_HEADS, "value_heads": HEADS, "key_dim": KEY, "value_dim": VALUE}
add(delta_step.delta_inputs, inputs, rows=ROWS, cols=COLS, heads=HEADS, taps=TAPS)
add(delta_step.delta_tokens, tokens, rows=ROWS, **DIMS, scale=0.5, eps=1e-3, norm_eps=1e-2)
