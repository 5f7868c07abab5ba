"""Parts of a call to check, if a float64 reference of the whole call would take too long.

The same part is taken from the arrays before and after a dispatch: the reference of the cut inputs must equal the cut
outputs. Rows and columns are picked evenly, including the first and the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wgpu_lora.gpu.tiling import Arrays, Constants

ROWS, COLUMN_BLOCKS, PAGE_BLOCKS = 32, 4, 64  # kept of a product, or of a page of parameters
PRODUCTS = 1 << 31  # calls with more multiply-adds are cut: about a second of NumPy
VALUES = 1 << 24  # calls with larger arrays are cut
Part = tuple[Arrays, Constants]
TakePart = Callable[[Arrays, Constants], Part | None]  # None: the whole call is checked


def cut_size(size: int, unit: int) -> int:
    """A size of one or two units and the remainder of `size`, if that is less."""
    return min(size, unit + size % unit)


def is_expensive(products: float, arrays: Arrays, *sizes: int) -> bool:
    """Whether a reference would take too much time or memory."""
    return products > PRODUCTS or max((*sizes, *(array.size for array in arrays.values())), default=0) > VALUES


def evenly_spaced(count: int, maximum: int) -> np.ndarray:
    """At most `maximum` values of range(count), evenly spread, including both ends."""
    return np.unique(np.linspace(0, count - 1, min(count, maximum)).round().astype(np.int64))


def select_rows(arrays: Arrays, names: str, count: int, rows: np.ndarray) -> Arrays:
    """The arrays, with those in `names`, which have `count` rows, cut to these rows."""
    selection = {n: a.reshape(count, -1)[rows] for n, a in arrays.items() if n in names.split()}
    selection = {n: a.reshape(-1) if arrays[n].ndim == 1 else a for n, a in selection.items()}
    if "count" in arrays:  # the number of rows in use
        selection["count"] = np.array([np.count_nonzero(rows < arrays["count"].reshape(-1)[0])], np.uint32)
    return {**arrays, **selection}


def select_blocks(names: str, block: int) -> TakePart:
    """The part of a kernel over a page of parameters: some of its blocks. names: the arrays with values per block."""

    def take(arrays: Arrays, c: Constants) -> Part | None:
        count = c.get("blocks") or c["size"] // block
        if count <= PAGE_BLOCKS:  # however small the arrays are, since these kernels have up to five in float64 each
            return None
        blocks = evenly_spaced(count, PAGE_BLOCKS)
        smaller: dict[str, Any] = {"blocks": blocks.size, "size": blocks.size * block}
        return select_rows(arrays, names, count, blocks), {**c, **{n: v for n, v in smaller.items() if n in c}}

    return take


def as_float64(array: np.ndarray) -> np.ndarray:
    """An array as a reference takes it: floats as float64, uint16 read as bf16, integers unchanged."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaNs, in memory that had other values
        return array.astype(np.float64) if array.dtype.kind == "f" else array


def random_values(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Normally distributed values as the device stores them: f32, f16, or bf16 (truncated)."""
    values = rng.standard_normal(shape, np.float32)
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if dtype == "f16" else values


def nmse(values: np.ndarray, want: np.ndarray) -> float:
    """Mean squared error divided by the mean square, where `want` is finite; infinite if `values` is not there."""
    finite = np.isfinite(want)
    values, want = values[finite].astype(np.float64), want[finite].astype(np.float64)
    if not np.isfinite(values).all():
        return float("inf")
    error, scale = float(((values - want) ** 2).sum()), float((want**2).sum())
    return error / scale if scale else (float("inf") if error else 0.0)
