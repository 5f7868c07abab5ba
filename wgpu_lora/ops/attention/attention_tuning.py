"""The tilings of the attention kernels, how they are checked, and the inputs on which they are timed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import lcm
from operator import itemgetter
from typing import Any

import numpy as np

from wgpu_lora.gpu import reference_values
from wgpu_lora.gpu.kernel import Variants, cdiv
from wgpu_lora.gpu.reference_values import random_values
from wgpu_lora.gpu.tiling import MATRIX, PLAIN, WORKGROUP, Arrays, Capabilities, Constants, Tiling

CHECKED = 32  # queries and keys of the cut that is checked, approximately
SPREAD = ((8, 2), (4, 2), (8, 1), (4, 1), (2, 2), (2, 1))  # (rows, stream rows per lane), the best bounds first
OFFERED = 3  # of these
FEW_QUERIES = 8  # tokens
ADDRESSES = 24  # registers of a thread of the family `workgroup` for these and a few others
LOADS = 16  # registers for what a thread loads at once for others, where half of the threads do
OTHERS = 38  # registers for addresses, loaded vectors and loop counters, as GPU compilers allocate them
CACHE = 24 << 10  # bytes that a subgroup holds on a CPU, so that they stay in the first cache
COLUMNS = 128  # of a head that a subgroup holds in matrices
SUBGROUPS = 8  # of a workgroup on matrix units
MEMORY = 32 << 10  # bytes of workgroup memory, of which it has less
MOST = 192  # registers; with more, a GPU runs too few subgroups at once to hide the latency of loads


def held_rows(tiling: Tiling) -> int:
    """Rows that a workgroup holds."""
    return tiling.rows * (tiling.lanes if tiling.family in (PLAIN, "broadcast") else 1)


def width_of(dim: int, lanes: int) -> int:
    """Values of the vectors that a lane of a spread tiling loads: 4, unless that leaves too many lanes idle."""
    width = 4
    while width > 1 and 1.5 * _columns(dim, lanes, width // 2) <= _columns(dim, lanes, width):
        width //= 2
    return width


def _columns(dim: int, lanes: int, width: int) -> int:
    """Columns per lane."""
    return cdiv(dim, width * lanes) * width


def on_matrix_units(capabilities: Capabilities, c: Any, roles: int) -> list[Tiling]:
    """The tiling of the family `matrix`, for heads of whole matrices. roles: of its subgroups; see the template."""
    unit, slices = capabilities.matrix, cdiv(c.dim, COLUMNS)
    if unit is None or getattr(c, "compute_dtype", "f32") != "f16" or c.rows <= FEW_QUERIES:
        return []
    if capabilities.workgroup_bytes < MEMORY or unit.sums != "f32":
        return []
    subgroup_rows = min(16, unit.lanes)  # rows of a subgroup
    rows = subgroup_rows * (SUBGROUPS // (roles * slices))
    span = 32 if c.dim <= COLUMNS else 16
    tiling = Tiling(MATRIX, SUBGROUPS * unit.lanes, rows, span=span, slices=slices, subgroups=SUBGROUPS)
    whole = c.dim % (roles * slices * unit.n) == 0 and c.dim % (slices * unit.k) == 0
    return [replace(tiling, m=unit.m, n=unit.n, k=unit.k)] if whole and rows > 0 and tiling.lanes <= 256 else []


def through_workgroup(capabilities: Capabilities, c: Any, sums: int, scores: int, row_values: int) -> list[Tiling]:
    """Tilings of the family `workgroup`, for many queries: the one that loads the fewest words per multiply-add and
    fits a device's registers, the same with half the rows, whose threads load more at once, and the one with the
    fewest registers.

    They differ by the threads across a block and the held rows of a thread. Columns past a head's end cost loads, too.
    """
    if capabilities.software or c.rows <= FEW_QUERIES or getattr(c, "block", 0):  # a cache's rows must not share blocks
        return []
    fitting = []
    for across, height in product((8, 16, 32), (8, 4)):
        vectors = cdiv(c.dim, 4 * across)  # of a thread's columns
        registers = height * (4 * sums * vectors + 4 * scores + row_values) + 16 * vectors + ADDRESSES
        words = scores * (1 / height + 1 / 4) + sums * (1 / height + 1 / (4 * vectors)) * 4 * across * vectors / c.dim
        if registers <= capabilities.registers:
            fitting.append((words, registers, across, height))
    if not fitting:
        return []
    best, small = min(fitting), min(fitting, key=itemgetter(1, 0))
    half = [(*best[2:], 4)] if best[1] + LOADS <= capabilities.registers else []
    shapes = dict.fromkeys([(*best[2:], 8), *half, (*small[2:], 8)])
    return [Tiling(WORKGROUP, across * down, height * down, span=4 * across) for across, height, down in shapes]


def tilings(sums: int, scores: int, row_values: int = 0, queries: bool = True) -> Variants:
    """Tilings of a kernel, which differ by the values that a lane holds.

    sums: outputs per held row and column. scores: values per pair of rows. row_values: values per held row.
    queries: whether the held rows are queries, else keys.
    """

    def fits(tiling: Tiling, capabilities: Capabilities, c: Any) -> bool:
        columns = _columns(c.dim, tiling.lanes, tiling.cols)
        values = tiling.rows * (sums * columns + 4 + scores * tiling.span + row_values)
        return values + OTHERS <= min(capabilities.registers, MOST)

    def variants(capabilities: Capabilities, c: Any) -> list[Tiling]:
        return [*on_matrix_units(capabilities, c, scores), *on_lanes(capabilities, c)]

    def on_lanes(capabilities: Capabilities, c: Any) -> list[Tiling]:
        plain, size = Tiling("plain", 32), capabilities.subgroup_size
        shared = through_workgroup(capabilities, c, sums, scores, row_values)
        if size < 4:
            return [*shared, plain]
        if getattr(c, "block", 0) and (capabilities.decoding or not capabilities.software):
            # In decoding each row is of another sequence, whose cache one workgroup reads once for a key head's group.
            # Whose rows those beside it are then changes nothing.
            group_rows = max(n for n in range(1, min(size, 8) + 1) if c.group % n == 0)
            few = [Tiling("spread", size, group_rows, width_of(c.dim, size), span) for span in (2, 1)]
            result = [tiling for tiling in few if capabilities.software or fits(tiling, capabilities, c)]
            if result:
                return [*result, *([plain] if capabilities.software else [])]
        if capabilities.software:
            # There loads take most of the time, and the rows of a lane share them.
            items = c.rows * c.group if queries else c.rows
            row_bytes = 4 * size * c.dim * (scores + sums)
            rows = [n for n in (4, 2, 1) if n == 1 or (n * row_bytes <= CACHE and (n // 2) * size < items)]
            return [*(Tiling("broadcast", size, rows=n, wide=capabilities.int64) for n in rows), plain]
        base = Tiling("spread", size, cols=width_of(c.dim, size))
        spread = [replace(base, rows=min(rows, size), span=span) for rows, span in SPREAD]
        return [*shared, *([tiling for tiling in spread if fits(tiling, capabilities, c)][:OFFERED] or spread[-1:])]

    return variants


@dataclass(frozen=True)
class AttentionTuning:
    """Inputs are one causal sequence of the call's size, whose last rows are the queries."""

    sizes: tuple[str, ...] = ("rows", "keys")
    later: tuple[str, ...] = ("cap", "compute_dtype")

    def work(self, c: Constants) -> float:
        """Multiply-adds of the scores if every query saw all keys."""
        keys = c["keys"] if "keys" in c else c["rows"]
        return float(c["rows"] * keys * c["kv_heads"] * c["group"] * c["dim"])

    def cut(self, c: Constants, tiling: Tiling) -> Constants:
        rows = reference_values.cut_size(c["rows"], lcm(CHECKED, held_rows(tiling)))
        if "keys" not in c:
            return c | {"rows": rows}
        extra = max(0, c["keys"] - c["rows"])  # a step of a short prompt has more rows than the cache has keys
        keys, block = rows + reference_values.cut_size(extra, CHECKED), c.get("block") or 1
        return c | {"rows": rows, "keys": block * cdiv(keys, block)}

    def inputs(self, c: Constants, present: tuple[str, ...], rng: np.random.Generator) -> Arrays:
        rows, heads = c["rows"], c["kv_heads"] * c["group"]
        keys = c.get("keys", rows)
        last = np.maximum(1, np.arange(1, rows + 1) + (keys - rows))  # a short prompt may have more rows than keys
        ranges = np.stack([np.zeros(rows), last, np.full(rows, rows), np.arange(rows)], axis=1)
        shapes = {
            **dict.fromkeys(("q", "y", "dy", "dq"), (rows, heads, c["dim"])),
            **dict.fromkeys(("k", "v", "dk", "dv"), (keys, c["kv_heads"], c["dim"])),
            "lse": (rows, heads),
        }
        arrays = {name: random_values(rng, "f32", *shape) for name, shape in shapes.items() if name in present}
        if "stats" in present:
            largest, zeros = np.abs(arrays["dy"]).max(axis=2), np.zeros((rows, heads), np.float32)
            arrays["stats"] = np.stack([zeros + 4, zeros, largest, zeros], axis=2)
        arrays |= {"ranges": ranges.astype(np.uint32)}
        if c.get("block"):
            arrays["blocks"] = rng.permutation(keys // c["block"]).astype(np.uint32)
            if c["cache_dtype"] == "f16":
                arrays |= {name: arrays[name].astype(np.float16) for name in "kv"}
        return {name: arrays[name] for name in present if name in arrays}


TUNING = AttentionTuning()
HELD = 16  # copies of the scores that a reference holds, approximately


def some_queries(arrays: Arrays, c: Constants) -> reference_values.Part | None:
    if not reference_values.is_expensive(HELD * TUNING.work(c), {}):
        return None
    rows = reference_values.evenly_spaced(c["rows"], reference_values.ROWS)
    return reference_values.select_rows(arrays, "q y dy dq lse stats ranges", c["rows"], rows), {**c, "rows": rows.size}


def one_head(arrays: Arrays, c: Constants) -> reference_values.Part | None:
    """A part with the first key head and its query heads."""
    if not reference_values.is_expensive(HELD * TUNING.work(c), {}):
        return None
    rows, heads = c["rows"], c["kv_heads"]
    result = {n: a if n == "ranges" else a.reshape(rows, heads, -1)[:, 0] for n, a in arrays.items()}
    return result, {**c, "kv_heads": 1}
