"""The order of a head's rows: GGUF files may interleave the halves of rotated heads."""

from __future__ import annotations

import numpy as np


def to_neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows [heads * head_dim, ...] from transformers' order to GGUF's interleaved one."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def to_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `to_neighbours`."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
