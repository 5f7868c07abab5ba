"""The one difference in what GGUF holds of a model: the halves of a rotated head may be interleaved."""

from __future__ import annotations

import numpy as np


def to_neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, ...] in GGUF's order from transformers'. Whole heads may be given, with their count."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def to_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `to_neighbours`."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
