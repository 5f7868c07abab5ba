"""Parts of a call that stand for the whole, where a float64 reference of all would take too long.

A part is taken alike of what the arrays held before a dispatch and of what they hold after it: the reference of the cut
inputs is then what the cut outputs must be. Rows and columns are picked evenly, the first and the last included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wgpu_lora.gpu.tunable import Arrays, Constants

ROWS, COLUMN_BLOCKS, PAGE_BLOCKS = 32, 4, 1024  # kept of a product or of a page of parameters
PRODUCTS = 1 << 31  # multiply-adds of a reference that are not cut: about a second
VALUES = 1 << 24  # values of a reference that are not cut
Part = tuple[Arrays, Constants]
TakePart = Callable[[Arrays, Constants], Part | None]  # None: all of the call is checked


def costly(products: float, arrays: Arrays, *sizes: int) -> bool:
    """Whether a reference would take long, or much memory."""
    return products > PRODUCTS or max((*sizes, *(array.size for array in arrays.values())), default=0) > VALUES


def picks(count: int, wanted: int) -> np.ndarray:
    """At most `wanted` of range(count), spread evenly, both ends among them."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).round().astype(np.int64))


def some_rows(arrays: Arrays, names: str, count: int, picked: np.ndarray) -> Arrays:
    """The arrays, those of `names`, which have some values for each of `count` rows, cut to the rows picked."""
    kept = {n: a.reshape(count, -1)[picked] for n, a in arrays.items() if n in names.split()}
    kept = {n: a.reshape(-1) if arrays[n].ndim == 1 else a for n, a in kept.items()}
    if "count" in arrays:  # the first so many rows are in use
        kept["count"] = np.array([np.count_nonzero(picked < arrays["count"].reshape(-1)[0])], np.uint32)
    return {**arrays, **kept}


def some_blocks(names: str, block: int) -> TakePart:
    """Of a kernel over a page of parameters: some of its blocks. names: the arrays that have something for each."""

    def take(arrays: Arrays, c: Constants) -> Part | None:
        if not costly(0, arrays):
            return None
        count = c.get("blocks") or c["size"] // block
        picked = picks(count, PAGE_BLOCKS)
        smaller: dict[str, Any] = {"blocks": picked.size, "size": picked.size * block}
        return some_rows(arrays, names, count, picked), {**c, **{n: v for n, v in smaller.items() if n in c}}

    return take
