"""Inputs of DoRA's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.kernels import Arrays, add, normal, poison, u32
from wgpu_lora.ops.linear import dora

ROWS, COLS, STRIDE = 100, 37, 64
RANGES = u32(3, 70, 70, 70, 80, 95).reshape(3, 2)  # of three slots, one without rows
BY_SLOT: dict[str, Any] = {"cols": COLS, "slots": 3}
SPLIT: dict[str, Any] = {**BY_SLOT, "rows": ROWS}


def scaled(rng: np.random.Generator, bias: bool) -> Arrays:
    arrays = {
        "u": normal(rng, ROWS, COLS),
        "gain": normal(rng, 3, STRIDE),
        "ranges": RANGES,
        "y": normal(rng, ROWS, COLS),
    }
    return arrays | ({"bias": normal(rng, COLS)} if bias else {})


def summed(rng: np.random.Generator) -> Arrays:
    return {
        "dy": normal(rng, ROWS, COLS),
        "u": normal(rng, ROWS, COLS),
        "ranges": RANGES,
        "partial": poison(3, 4, COLS),
    }


def divided(rng: np.random.Generator) -> Arrays:
    norm = normal(rng, 3, STRIDE) ** 2 + 0.1
    norm[1] = 0
    return {"partial": normal(rng, 3, 4, COLS), "norm": norm, "gradient": normal(rng, 3 * 1024)}


def measured(rng: np.random.Generator, rows: int = 67, rank: int = 5) -> Arrays:
    """Consistent products, whose sum of squares is not negative; the first row is of zeros."""
    w, a, b = normal(rng, rows, 31), normal(rng, rank, 31), normal(rng, rows, rank)
    w[0], b[0] = 0, 0
    squares = (w.astype(np.float64) ** 2).sum(axis=1).astype(np.float32)
    fixed = {"b": b, "m": normal(rng, rows), "squares": squares, "scale": normal(rng, 4)}
    return {"p": a @ w.T, "gram": a @ a.T, **fixed, "norm": poison(rows), "gain": poison(rows)}


add(dora.magnitude_scale, lambda rng: scaled(rng, False), **SPLIT, stride=STRIDE, first_row=2)
add(dora.magnitude_scale, lambda rng: scaled(rng, True), **SPLIT, stride=STRIDE, accumulate=True)
add(dora.magnitude_partial, summed, **SPLIT, chunk=20, chunks=4, first_row=2)
add(dora.magnitude_gradient, divided, **BY_SLOT, chunks=4, stride=STRIDE, slot_stride=1024)
add(dora.gram, lambda rng: {"a": normal(rng, 5, 37), "y": poison(5, 5)}, rows=5, cols=37)
add(dora.adapted_norm, measured, rows=67, rank=5, scale_at=2)
