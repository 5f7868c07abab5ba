"""Parts of a kernel's arrays that stand for the whole, where a float64 reference of all would take too long.

A cut is applied alike to what the arrays held before a dispatch and to what they hold after it: the reference of the
cut inputs is then what the cut outputs must be. Rows and columns are picked evenly, the first and the last included.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.tunable import Arrays, Constants
from wgpu_lora.ops.optimizer import BLOCK as PAGE_BLOCK
from wgpu_lora.weights.nf4_codes import BLOCK

ROWS, COLUMN_BLOCKS = 32, 4  # kept of a matrix product; a block is one of NF4's
PAGE_BLOCKS = 1024  # kept of a page of parameters
PRODUCTS = 1 << 31  # multiply-adds of a reference that are not cut: about a second
VALUES = 1 << 24  # values of a reference that are not cut
Part = tuple[Arrays, Constants]


def cut(kernel: Kernel, arrays: Arrays, c: Constants) -> Part | None:
    """The part of a call that is checked, or None where all of it is."""
    if kernel.name == "embedding_rows":  # not for the time, but its table may be gigabytes once widened
        return _embedding(arrays, c)
    return CUTS[kernel.name](arrays, c) if kernel.name in CUTS and _long(kernel, arrays, c) else None


def _long(kernel: Kernel, arrays: Arrays, c: Constants) -> bool:
    """Whether a reference would take long, or much memory."""
    work = kernel.tuning.work(c) if kernel.tuning else 0
    if "kv_heads" in c:
        return work > PRODUCTS // 16  # a reference holds its scores several times
    return work > PRODUCTS or max(c.get("n", 0) * c.get("k", 0), *(a.size for a in arrays.values())) > VALUES


def picks(count: int, wanted: int) -> np.ndarray:
    """At most `wanted` of range(count), spread evenly, both ends among them."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).round().astype(np.int64))


def _rows(arrays: Arrays, names: str, count: int, picked: np.ndarray) -> Arrays:
    """The arrays, those of `names`, which have some values for each of `count` rows, cut to the rows picked."""
    kept = {n: a.reshape(count, -1)[picked] for n, a in arrays.items() if n in names.split()}
    kept = {n: a.reshape(-1) if arrays[n].ndim == 1 else a for n, a in kept.items()}
    if "count" in arrays:  # the first so many rows are in use
        kept["count"] = np.array([np.count_nonzero(picked < arrays["count"].reshape(-1)[0])], np.uint32)
    return {**arrays, **kept}


def _product(arrays: Arrays, c: Constants) -> Part:
    """Some of m's rows, and of n's columns where these are whole blocks of NF4's constants."""
    picked, n, k, nt = picks(c["m"], ROWS), c["n"], c["k"], c["form"] == "nt"
    arrays = _rows(arrays, "a y row_scale a_scale", c["m"], picked)
    c = {**c, "m": picked.size}
    if n % BLOCK or ("scales" in arrays and k % BLOCK):
        return arrays, c
    blocks = picks(n // BLOCK, COLUMN_BLOCKS)

    def columns(size: int) -> np.ndarray:
        """Of the blocks, in units of which a block has so many."""
        return (size * blocks[:, None] + np.arange(size)).reshape(-1)

    each, words = columns(BLOCK), columns(BLOCK // 8)
    wide = c.get("y_first", 0) + each
    kept: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "y": lambda a: a.reshape(c["m"], -1)[:, wide],
        "bias": lambda a: a[wide],
        "b": lambda a: a.reshape(n, k)[each] if nt else a.reshape(k, n)[:, each],
        "codes": lambda a: a.reshape(-1, n)[:, each] if nt else a.reshape(-1, k)[words],
        "scales": lambda a: a.reshape(n, -1)[each] if nt else a.reshape(k, -1)[:, blocks],
    }
    arrays = {name: kept[name](a) if name in kept else a for name, a in arrays.items()}
    places = {name: 0 for name in ("y_skip", "y_first") if name in c}
    return arrays, {**c, "n": each.size, **places}


def _queries(arrays: Arrays, c: Constants) -> Part:
    picked = picks(c["rows"], ROWS)
    return _rows(arrays, "q y dy dq lse stats ranges", c["rows"], picked), {**c, "rows": picked.size}


def _one_head(arrays: Arrays, c: Constants) -> Part:
    """The first key head and the query heads that share it."""
    rows, heads = c["rows"], c["kv_heads"]
    kept = {n: a if n == "ranges" else a.reshape(rows, heads, -1)[:, 0] for n, a in arrays.items()}
    return kept, {**c, "kv_heads": 1}


def _page(arrays: Arrays, c: Constants) -> Part:
    """Some blocks of a page of parameters."""
    count = c.get("blocks") or c["size"] // PAGE_BLOCK
    picked = picks(count, PAGE_BLOCKS)
    names = "x params grads first_moment second_moment sums diverged block_slots"
    smaller = {"blocks": picked.size, "size": picked.size * PAGE_BLOCK}
    return _rows(arrays, names, count, picked), {**c, **{n: value for n, value in smaller.items() if n in c}}


def _embedding(arrays: Arrays, c: Constants) -> Part:
    """The rows of the table that are asked for, and no others."""
    ids, first = arrays["ids"].reshape(-1).astype(np.int64), c["first"]
    used = np.unique(np.append(ids[(ids >= first) & (ids < first + c["count"])], first))
    places = np.searchsorted(used, ids)
    known = used.take(places, mode="clip") == ids
    renamed = np.where(known, places, 0xFFFFFFFF).astype(np.uint32)
    table = arrays["table"].reshape(c["count"], -1)[used - first]
    return {**arrays, "ids": renamed, "table": table}, {**c, "first": 0, "count": used.size}


CUTS: dict[str, Callable[[Arrays, Constants], Part]] = {
    **dict.fromkeys(("matmul_nt", "matmul_nn", "nf4_matmul", "nf4_matmul_backward"), _product),
    **dict.fromkeys(("attention_forward", "attention_backward_q"), _queries),
    "attention_backward_kv": _one_head,
    **dict.fromkeys(("square_sums", "adamw", "adamw_check"), _page),
}
