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
Cut = Callable[[Arrays, Constants], tuple[Arrays, Constants]]

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
    return CUTS[name](arrays, c) if name in CUTS and _cost(c) else None


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


def _nt(arrays: Arrays, c: Constants) -> tuple[Arrays, Constants]:
    rows, cols = picks(c["m"], ROWS), picks(c["n"], COLUMNS)
    wide = {**arrays, "b": arrays["b"].reshape(c["n"], -1)[cols]}
    return _ranged(wide, c, rows, cols)


def _nn(arrays: Arrays, c: Constants) -> tuple[Arrays, Constants]:
    rows, cols = picks(c["m"], ROWS), picks(c["n"], COLUMNS)
    wide = {**arrays, "b": np.ascontiguousarray(arrays["b"].reshape(c["k"], c["n"])[:, cols])}
    return _ranged(wide, c, rows, cols)


def _ranged(arrays: Arrays, c: Constants, rows: np.ndarray, cols: np.ndarray) -> tuple[Arrays, Constants]:
    """a's and y's column ranges become whole rows."""
    m, first, y_first = c["m"], c.get("a_first", 0), c.get("y_first", 0)
    arrays = {
        **arrays,
        "a": arrays["a"].reshape(m, -1)[rows, first : first + c["k"]],
        "y": arrays["y"].reshape(m, -1)[np.ix_(rows, y_first + cols)],
    }
    if "bias" in arrays:
        arrays["bias"] = arrays["bias"][y_first + cols]
    for name in ("row_scale", "a_scale"):
        if name in arrays:
            arrays[name] = arrays[name][rows]
    zero: Constants = {name: 0 for name in ("a_skip", "a_first", "y_skip", "y_first") if name in c}
    return arrays, {**c, **zero, "m": rows.size, "n": cols.size}


def _nf4_nt(arrays: Arrays, c: Constants) -> tuple[Arrays, Constants]:
    if c["k"] % BLOCK:
        return arrays, c  # blocks of constants straddle rows
    n, rows, cols = c["n"], picks(c["m"], ROWS), picks(c["n"], COLUMNS)
    codes = np.ascontiguousarray(arrays["codes"].reshape(-1, n)[:, cols])
    return _ranged({**arrays, "codes": codes, "scales": arrays["scales"].reshape(n, -1)[cols]}, c, rows, cols)


def _nf4_nn(arrays: Arrays, c: Constants) -> tuple[Arrays, Constants]:
    n, k = c["n"], c["k"]
    if n % BLOCK:
        return arrays, c
    blocks = picks(n // BLOCK, COLUMNS // BLOCK)
    cols = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    codes = arrays["codes"].reshape(n // BLOCK, -1, k)[blocks]
    scales = np.ascontiguousarray(arrays["scales"].reshape(k, n // BLOCK)[:, blocks])
    return _ranged({**arrays, "codes": codes, "scales": scales}, c, picks(c["m"], ROWS), cols)


def _one_head(arrays: Arrays, c: Constants) -> tuple[Arrays, Constants]:
    """The first key head and the query heads that share it; of the kernels that work by query, some queries alone."""
    heads, group = c["kv_heads"], c["group"]
    shapes = {
        **dict.fromkeys(("q", "y", "dy", "dq"), (heads, group, c["dim"])),
        **dict.fromkeys(("k", "v", "dk", "dv"), (heads, c["dim"])),
        "lse": (heads, group),
        "stats": (heads, group, 2),
    }
    kept = {n: a.reshape(-1, *shapes[n])[:, :1] if n in shapes else a for n, a in arrays.items()}
    if "keys" not in c:
        return kept, {**c, "kv_heads": 1}
    queries = picks(c["rows"], ROWS)
    of_queries = ("q", "y", "dy", "dq", "lse", "stats", "ranges")
    kept = {n: a.reshape(c["rows"], -1)[queries] if n in of_queries else a for n, a in kept.items()}
    return kept, {**c, "kv_heads": 1, "rows": queries.size}


def _embedding(arrays: Arrays, c: Constants) -> tuple[Arrays, Constants]:
    """The rows of the table that are asked for, and no others."""
    ids, first = arrays["ids"].reshape(-1), c["first"]
    used = np.unique(ids[(ids >= first) & (ids < first + c["count"])]).astype(np.int64)
    if not used.size:
        return {**arrays, "table": arrays["table"].reshape(c["count"], -1)[:1]}, {**c, "count": 1}
    place = {int(i): at for at, i in enumerate(used)}
    renamed = np.array([place.get(int(i), 0xFFFFFFFF) for i in ids], np.uint32)
    table = arrays["table"].reshape(c["count"], -1)[used - first]
    return {**arrays, "ids": renamed, "table": table}, {**c, "first": 0, "count": used.size}


def _softmax(arrays: Arrays, c: Constants) -> tuple[Arrays, Constants]:
    rows = picks(c["rows"], ROWS)
    shapes = {"logits": (-1, c["cols"]), "state": (-1, 4), "targets": (-1,), "rescale": (-1,)}
    kept = {n: arrays[n].reshape(shape)[rows] for n, shape in shapes.items()}
    count = np.array([np.count_nonzero(rows < int(arrays["count"].reshape(-1)[0]))], np.uint32)
    return {**arrays, **kept, "count": count}, {**c, "rows": rows.size}


def _page(arrays: Arrays, c: Constants) -> tuple[Arrays, Constants]:
    values = PAGE_BLOCKS * PAGE_BLOCK
    flat = {n: a.reshape(-1) for n, a in arrays.items()}
    paged, by_block = ("x", "params", "grads", "first_moment", "second_moment"), ("sums", "diverged", "block_slots")
    kept = {n: a[:values] if n in paged else a[:PAGE_BLOCKS] if n in by_block else a for n, a in flat.items()}
    return kept, {**c, **({"blocks": PAGE_BLOCKS} if "blocks" in c else {"size": values})}


def _absmax(arrays: Arrays, c: Constants) -> tuple[Arrays, Constants]:
    blocks = VALUES // 16 // BLOCK
    kept = {"w": arrays["w"].reshape(-1)[: blocks * BLOCK], "absmax": arrays["absmax"].reshape(-1)[:blocks]}
    return kept, {**c, "size": blocks * BLOCK}


def _encode(arrays: Arrays, c: Constants) -> tuple[Arrays, Constants]:
    size_in, first = c["size_in"], c["first"]
    rows = picks(c["rows"], max(1, VALUES // 16 // size_in))
    if size_in % BLOCK:
        rows = np.arange(max(1, VALUES // 16 // size_in // BLOCK) * BLOCK)  # blocks straddle rows: the first, together
    absmax = arrays["absmax"].reshape(-1)
    absmax = absmax[: rows.size * size_in // BLOCK] if size_in % BLOCK else absmax.reshape(-1, size_in // BLOCK)[rows]
    kept = {
        "w": arrays["w"].reshape(-1)[: c["rows"] * size_in].reshape(c["rows"], size_in)[rows],
        "absmax": absmax.reshape(-1),
        "codes": np.ascontiguousarray(arrays["codes"].reshape(-1, c["out"])[:, first + rows]),
    }
    return kept, {**c, "rows": rows.size, "first": 0, "out": rows.size}


CUTS: dict[str, Cut] = {
    "matmul_nt": _nt,
    "matmul_nn": _nn,
    "nf4_matmul": _nf4_nt,
    "nf4_matmul_backward": _nf4_nn,
    "attention_forward": _one_head,
    "attention_backward_q": _one_head,
    "attention_backward_kv": _one_head,
    "softmax_chunk": _softmax,
    "square_sums": _page,
    "adamw": _page,
    "adamw_check": _page,
    "nf4_absmax": _absmax,
    "nf4_encode": _encode,
}
