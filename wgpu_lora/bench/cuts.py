"""Parts of a kernel's arrays that stand for the whole, where a float64 reference of all would take too long.

A cut is applied alike to what the arrays held before a dispatch and to what they hold after it: the reference of the
cut inputs is then what the cut outputs must be. Rows and columns are picked evenly, the first and the last included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wgpu_lora.ops.optimizer import BLOCK as PAGE_BLOCK
from wgpu_lora.weights.nf4_codes import BLOCK

Arrays = dict[str, np.ndarray]
Constants = dict[str, Any]
Axis = int | tuple[int, np.ndarray]  # its size, and what is kept of it where that is not all
Layouts = dict[str, tuple[Axis, ...]]  # of the arrays that are cut; `count` has the axis whose first ones it counts

ROWS, COLUMNS = 32, 256  # kept of a matrix product
PAGE_BLOCKS = 1024  # kept of a page of parameters
PRODUCTS = 1 << 31  # multiply-adds of a reference that are not cut: about a second
VALUES = 1 << 24  # values of a reference that are not cut


def picks(count: int, wanted: int) -> np.ndarray:
    """At most `wanted` of range(count), spread evenly, both ends among them."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).round().astype(np.int64))


def shaped(name: str, arrays: Arrays, c: Constants) -> Arrays:
    """The arrays in the shapes that the kernel's reference works on, where those differ from the tensors'."""
    if name in ("rmsnorm_forward", "rmsnorm_backward", "to_half"):
        return {n: a.reshape(c["rows"], c["cols"]) if n in ("x", "y", "dy", "dx") else a for n, a in arrays.items()}
    return arrays


def cut(name: str, arrays: Arrays, c: Constants) -> tuple[Arrays, Constants] | None:
    """The part of a call that is checked, or None where all of it is."""
    if name == "embedding_rows":  # not for the time, but its table may be gigabytes once widened
        return _embedding(arrays, c)
    if name not in CUTS or not _cost(c):
        return None
    layouts, changed = CUTS[name](c)
    kept = {n: _kept(n, a, layouts[n]) if n in layouts else a for n, a in arrays.items()}
    return kept, {**c, **{n: value for n, value in changed.items() if n in c}}


def _kept(name: str, array: np.ndarray, layout: tuple[Axis, ...]) -> np.ndarray:
    if name == "count":
        return np.array([np.count_nonzero(_places(layout[0]) < int(array.reshape(-1)[0]))], np.uint32)
    sizes = [axis if isinstance(axis, int) else axis[0] for axis in layout]
    array = array.reshape(-1)[: int(np.prod(sizes))].reshape(sizes)
    for number, axis in enumerate(layout):
        array = array if isinstance(axis, int) else array.take(axis[1], number)
    return np.ascontiguousarray(array)


def _places(axis: Axis) -> np.ndarray:
    return np.arange(axis) if isinstance(axis, int) else axis[1]


def _cost(c: Constants) -> bool:
    """Whether a reference would take long, or much memory."""
    if "k" in c:
        return c["m"] * c["n"] * c["k"] > PRODUCTS or max(c["m"] * c["k"], c["n"] * c["k"], c["m"] * c["n"]) > VALUES
    if "kv_heads" in c:
        return c["rows"] * c.get("keys", c["rows"]) * c["kv_heads"] * c["group"] * c["dim"] > PRODUCTS // 16
    if "size_in" in c:
        return c["rows"] * c["size_in"] > VALUES
    values = c.get("size") or c.get("blocks", 0) * PAGE_BLOCK or c.get("rows", 0) * c.get("cols", 0)
    return values > VALUES


def _product(c: Constants, n: Axis, **of_b: tuple[Axis, ...]) -> tuple[Layouts, Constants]:
    """a's and y's column ranges become whole rows."""
    m, k, cols = (c["m"], picks(c["m"], ROWS)), c["k"], _places(n)
    wide = (c["n"] + c.get("y_skip", 0), c.get("y_first", 0) + cols)
    a = (m, (k + c.get("a_skip", 0), c.get("a_first", 0) + np.arange(k)))
    layouts: Layouts = {"a": a, "y": (m, wide), "bias": (wide,), **of_b}
    layouts |= dict.fromkeys(("row_scale", "a_scale", "count"), (m,))
    zero = dict.fromkeys(("a_skip", "a_first", "y_skip", "y_first"), 0)
    return layouts, {**zero, "m": m[1].size, "n": cols.size}


def _columns(c: Constants) -> Axis:
    return c["n"], picks(c["n"], COLUMNS)


def _nf4_nt(c: Constants) -> tuple[Layouts, Constants]:
    if c["k"] % BLOCK:
        return {}, {}  # blocks of constants straddle rows
    n = _columns(c)
    return _product(c, n, codes=(c["k"] // 8, n), scales=(n, c["k"] // BLOCK))


def _nf4_nn(c: Constants) -> tuple[Layouts, Constants]:
    if c["n"] % BLOCK:
        return {}, {}
    blocks = (c["n"] // BLOCK, picks(c["n"] // BLOCK, COLUMNS // BLOCK))
    n = (c["n"], (blocks[1][:, None] * BLOCK + np.arange(BLOCK)).reshape(-1))
    return _product(c, n, codes=(blocks, BLOCK // 8, c["k"]), scales=(c["k"], blocks))


def _one_head(c: Constants) -> tuple[Layouts, Constants]:
    """The first key head and the query heads that share it; of the kernels that work by query, some queries alone."""
    head, group = (c["kv_heads"], np.zeros(1, np.int64)), c["group"]
    rows: Axis = (c["rows"], picks(c["rows"], ROWS)) if "keys" in c else c["rows"]
    layouts: Layouts = {
        **dict.fromkeys(("q", "y", "dy", "dq"), (rows, head, group, c["dim"])),
        **dict.fromkeys(("k", "v", "dk", "dv"), (c["keys"] if "keys" in c else c["rows"], head, c["dim"])),
        "lse": (rows, head, group),
        "stats": (rows, head, group, 2),
        "ranges": (rows, 4),
    }
    return layouts, {"kv_heads": 1, "rows": _places(rows).size}


def _softmax(c: Constants) -> tuple[Layouts, Constants]:
    rows = (c["rows"], picks(c["rows"], ROWS))
    layouts: Layouts = {"logits": (rows, c["cols"]), "state": (rows, 4)}
    return layouts | dict.fromkeys(("targets", "rescale", "count"), (rows,)), {"rows": rows[1].size}


def _page(c: Constants) -> tuple[Layouts, Constants]:
    count = c.get("blocks") or c["size"] // PAGE_BLOCK
    blocks = (count, np.arange(min(count, PAGE_BLOCKS)))
    layouts: Layouts = dict.fromkeys(("x", "params", "grads", "first_moment", "second_moment"), (blocks, PAGE_BLOCK))
    layouts |= dict.fromkeys(("sums", "diverged", "block_slots"), (blocks,))
    return layouts, {"blocks": blocks[1].size, "size": blocks[1].size * PAGE_BLOCK}


def _absmax(c: Constants) -> tuple[Layouts, Constants]:
    blocks = (c["size"] // BLOCK, np.arange(VALUES // 16 // BLOCK))
    return {"w": (blocks, BLOCK), "absmax": (blocks,)}, {"size": blocks[1].size * BLOCK}


def _encode(c: Constants) -> tuple[Layouts, Constants]:
    size_in, most = c["size_in"], max(1, VALUES // 16 // c["size_in"])
    straddle = size_in % BLOCK  # blocks of constants go over rows: the first rows, together
    rows = np.arange(max(1, most // BLOCK) * BLOCK) if straddle else picks(c["rows"], most)
    each = BLOCK if straddle else 1
    absmax = (c["rows"] // each, rows[: rows.size // each]), size_in * each // BLOCK
    layouts: Layouts = {"w": ((c["rows"], rows), size_in), "absmax": absmax}
    layouts["codes"] = (-(-size_in // 8), (c["out"], c["first"] + rows))
    return layouts, {"rows": rows.size, "first": 0, "out": rows.size}


def _embedding(arrays: Arrays, c: Constants) -> tuple[Arrays, Constants]:
    """The rows of the table that are asked for, and no others."""
    ids, first = arrays["ids"].reshape(-1).astype(np.int64), c["first"]
    table = arrays["table"].reshape(c["count"], -1)
    used = np.unique(ids[(ids >= first) & (ids < first + c["count"])])
    used = used if used.size else np.array([first])
    places = np.searchsorted(used, ids)
    known = used.take(places, mode="clip") == ids
    renamed = np.where(known, places, 0xFFFFFFFF).astype(np.uint32)
    return {**arrays, "ids": renamed, "table": table[used - first]}, {**c, "first": 0, "count": used.size}


CUTS: dict[str, Callable[[Constants], tuple[Layouts, Constants]]] = {
    "matmul_nt": lambda c: _product(c, _columns(c), b=(_columns(c), c["k"])),
    "matmul_nn": lambda c: _product(c, _columns(c), b=(c["k"], _columns(c))),
    "nf4_matmul": _nf4_nt,
    "nf4_matmul_backward": _nf4_nn,
    **dict.fromkeys(("attention_forward", "attention_backward_q", "attention_backward_kv"), _one_head),
    "softmax_chunk": _softmax,
    **dict.fromkeys(("square_sums", "adamw", "adamw_check"), _page),
    "nf4_absmax": _absmax,
    "nf4_encode": _encode,
}
