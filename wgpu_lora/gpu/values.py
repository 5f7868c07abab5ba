"""Values as the device stores them and as references take them, and how far they are apart."""

from __future__ import annotations

import numpy as np


def widened(array: np.ndarray) -> np.ndarray:
    """An array as a reference takes it: floats as float64, uint16 read as bf16, integers unchanged."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaNs, in memory that had other values
        return array.astype(np.float64) if array.dtype.kind == "f" else array


def stored(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Normally distributed values as the device stores them: f32, f16, or bf16 (truncated)."""
    values = rng.standard_normal(shape, np.float32)
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if dtype == "f16" else values


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    """Mean squared error divided by the mean square, where `want` is finite; infinite if `got` is not finite there."""
    known = np.isfinite(want)
    got, want = got[known].astype(np.float64), want[known].astype(np.float64)
    if not np.isfinite(got).all():
        return float("inf")
    error, scale = float(((got - want) ** 2).sum()), float((want**2).sum())
    return error / scale if scale else (float("inf") if error else 0.0)
