"""Tilings of the matrix products, and how they describe their calls to the tuner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import numpy as np

from wgpu_lora.gpu import part
from wgpu_lora.gpu.kernel import Variants, cdiv
from wgpu_lora.gpu.tiling import Capabilities, Tiling
from wgpu_lora.gpu.tunable import Arrays, Constants
from wgpu_lora.gpu.values import stored

FEW_ROWS = 8
BLOCK = 64  # a part of a product keeps or drops this many columns together, as a block of scales
CHECKED = 64  # rows, columns and steps of the cut that is checked, approximately
Operand = Callable[[Constants, np.random.Generator], Arrays]
TakeColumns = Callable[[Arrays, Constants, np.ndarray], Arrays | None]


def tilings(
    span: int, *shapes: tuple[int, int], software: tuple[int, int, int] | None = None, beside: int = 0
) -> Variants:
    """Variants with tilings of these (rows, columns per lane), the default first; rounds are multiples of `span` steps.

    software: (rows, columns per lane, steps) of the default on CPU drivers with 64-bit integers, where large tiles are
        faster although they do not fit the registers, since loads cost much more than moving sums to memory.
    beside: registers of a lane besides its sums, without 64-bit loads, by the compilers' table (`make gpu-compilers`).
        Tilings that need more than a device has are left out.

    Without subgroups a workgroup has 32 independent lanes. Products of few rows, as in decoding, get tiles of at most
    that many rows and longer rounds, so that every lane loads part of a.
    """

    def variants(capabilities: Capabilities, c: Any) -> list[Tiling]:
        size, chosen, steps = capabilities.subgroup_size, shapes, span
        if c.form != "tn" and c.m <= FEW_ROWS:
            few = 1 << (c.m - 1).bit_length()
            chosen, steps = ((few, 4), (few, 2)), max(span, 32 // few)
        plain = Tiling("plain", 32, rows=min(chosen[0][0], 8), cols=4, span=span)
        if size not in (4, 8, 16, 32, 64):
            return [plain, replace(plain, cols=2)]
        found = [Tiling("broadcast", size, rows, cols, steps) for rows, cols in chosen]
        fitting = [tiling for tiling in found if tiling.rows * tiling.cols + beside <= capabilities.registers]
        if capabilities.int64:
            wide = [replace(tiling, wide=True) for tiling in found]
            if capabilities.software and software and c.m > FEW_ROWS:
                wide.insert(0, Tiling("broadcast", size, *software, wide=True))
            fitting = [*wide, *fitting] if capabilities.software else [*fitting, *wide]
        return [*fitting, plain]

    return variants


def dense_operand(c: Constants, rng: np.random.Generator) -> Arrays:
    """b of a dense product: [n, k] for nt, [k, n] for nn."""
    return {"b": stored(rng, c["b_type"], *((c["n"], c["k"]) if c["form"] == "nt" else (c["k"], c["n"])))}


def block(tiling: Tiling) -> tuple[int, int]:
    """(rows, columns) of y that a workgroup computes."""
    return tiling.rows, tiling.lanes * tiling.cols


@dataclass(frozen=True)
class MatmulTuning:
    """Products of the batch's rows with a frozen matrix, y[m, n] from a[m, k].

    operand: creates the bindings of b, in its format.
    """

    operand: Operand
    sizes: tuple[str, ...] = ("m", "n", "k")
    batch: tuple[str, ...] = ("m",)

    def work(self, c: Constants) -> float:
        return float(c["m"] * c["n"] * c["k"])

    def cut(self, c: Constants, tiling: Tiling) -> Constants:
        small = _smaller_factor(_fewer(c, tiling))
        for skip, first in (("a_skip", "a_first"), ("y_skip", "y_first")):
            if skip in small:
                small[skip], small[first] = small[skip] % 4, small[first] % 4
                small[skip] += 4 if small[skip] < small[first] else 0
        return small

    def inputs(self, c: Constants, present: tuple[str, ...], rng: np.random.Generator) -> Arrays:
        m, width = c["m"], c["n"] + c.get("y_skip", 0)
        arrays = {
            "a": stored(rng, c["a_type"], m, c["k"] + c.get("a_skip", 0)),
            "y": stored(rng, "f32", m, width),
            "bias": stored(rng, "f32", width),
            "row_scale": stored(rng, "f32", m),
            "a_scale": stored(rng, "f32", m),
            "count": np.array([m], np.uint32),
            **self.operand(c, rng),
            **(_factors(c, rng) if c["rank"] else {}),
        }
        return {name: arrays[name] for name in present if name in arrays}


def _smaller_factor(c: Constants) -> Constants:
    """A smaller call with LoRA's offsets and strides as small as its sizes allow, with the same remainders."""
    if not c["rank"]:
        return c
    small = c | {name: c[name] % 4 for name in ("h_skip", "h_first")}
    small["h_skip"] += 4 if small["h_skip"] < small["h_first"] else 0
    return small | {"stride": 4 * cdiv(c["n"] * c["rank"], 4) + c["stride"] % 4}


def _factors(c: Constants, rng: np.random.Generator) -> Arrays:
    """h, and the factors of two slots that share the rows."""
    m, stride = c["m"], c["stride"]
    ranges = np.array([[0, m // 2], [m // 2, m]], np.uint32) + np.uint32(c["first_row"])
    h, factor = stored(rng, "f32", m, c["rank"] + c["h_skip"]), stored(rng, "f32", 2, stride)
    return {"h": h, "factor": factor, "ranges": ranges}


@dataclass(frozen=True)
class LoraTuning:
    """LoRA's products, one matrix per slot. batch: the dim of the batch's rows, and the number of slots."""

    batch: tuple[str, ...] = ("m", "slots")
    sizes: tuple[str, ...] = ("m", "n", "k")

    def work(self, c: Constants) -> float:
        return float(c["m"] * c["n"] * c["k"])

    def cut(self, c: Constants, tiling: Tiling) -> Constants:
        small = _fewer(c, tiling)
        return {**small, "stride": 4 * cdiv(_slot_values(small), 4) + c["stride"] % 4}

    def inputs(self, c: Constants, present: tuple[str, ...], rng: np.random.Generator) -> Arrays:
        """Arrays with the rows divided evenly among the slots."""
        m, n, k, slots = c["m"], c["n"], c["k"], c["slots"]
        stacked = stored(rng, "f32", slots, c["stride"])
        if c["form"] == "tn":
            arrays = {"a": stored(rng, "f32", k, m), "b": stored(rng, "f32", k, n), "y": stacked}
        else:
            arrays = {"a": stored(rng, "f32", m, k), "b": stacked, "y": stored(rng, "f32", m, n)}
        bounds = np.linspace(0, c[self.batch[0]], slots + 1).astype(np.uint32)
        arrays["ranges"] = np.stack([bounds[:-1], bounds[1:]], axis=1) + np.uint32(c["first_row"])
        arrays["scale"] = stored(rng, "f32", slots)
        return {name: arrays[name] for name in present}


def _slot_values(c: Constants) -> int:
    return int(c["m"] * c["n"] if c["form"] == "tn" else c["n"] * c["k"])


def _fewer(c: Constants, tiling: Tiling) -> Constants:
    """The call with smaller m, n and k of at least two blocks of the tiling each, whose remainders are the same: by the
    blocks, so that the same edges are ragged, and by CHECKED, which covers what `divisibility` asks."""
    rows, columns = block(tiling)
    steps = {"m": rows, "n": columns, "k": tiling.span}
    return c | {size: part.fewer(c[size], 2 * lcm(CHECKED, step)) for size, step in steps.items()}


def product_part(columns: TakeColumns) -> part.TakePart:
    """The parts of products with a frozen matrix: some rows and, where `columns` can take these from b, some columns.

    columns: (arrays, constants, columns of y) -> b's bindings with these columns alone, or None. The columns are whole
        blocks of BLOCK, of which the last may be shorter.
    """

    def take(arrays: Arrays, c: Constants) -> part.Part | None:
        m, n, k = c["m"], c["n"], c["k"]
        if not part.costly(m * n * k, arrays, n * k):
            return None
        rows = part.picks(m, part.ROWS)
        arrays, c = part.some_rows(arrays, "a y row_scale a_scale h", m, rows), {**c, "m": rows.size}
        if "ranges" in arrays:
            arrays["ranges"], c["first_row"] = _picked_ranges(arrays["ranges"], c["first_row"], m, rows), 0
        blocks = part.picks(cdiv(n, BLOCK), part.COLUMN_BLOCKS)
        each = np.flatnonzero(np.isin(np.arange(n) // BLOCK, blocks))
        b = columns(arrays, c, each)
        if b is None:
            return arrays, c
        if "factor" in arrays:
            arrays["factor"] = _factor_columns(arrays["factor"], c, each)
            c["stride"] = c["rank"] * each.size
        wide = c.get("y_first", 0) + each
        kept = {**arrays, **b, "y": arrays["y"].reshape(rows.size, -1)[:, wide]}
        if "bias" in arrays:
            kept["bias"] = arrays["bias"][wide]
        return kept, {**c, "n": each.size, **{name: 0 for name in ("y_skip", "y_first") if name in c}}

    return take


def _picked_ranges(ranges: np.ndarray, first_row: int, count: int, rows: np.ndarray) -> np.ndarray:
    """The slots' ranges of the picked rows, counted from 0."""
    here = (ranges.reshape(-1, 2).astype(int) - first_row).clip(0, count)
    return np.searchsorted(rows, here).astype(np.uint32)


def _factor_columns(factor: np.ndarray, c: Constants, columns: np.ndarray) -> np.ndarray:
    n, rank = c["n"], c["rank"]
    values = factor.reshape(-1, c["stride"])[:, : n * rank]
    if c["form"] == "nt":
        return values.reshape(-1, n, rank)[:, columns].reshape(len(values), -1)
    return values.reshape(-1, rank, n)[:, :, columns].reshape(len(values), -1)


def dense_columns(arrays: Arrays, c: Constants, columns: np.ndarray) -> Arrays:
    n, k, b = c["n"], c["k"], arrays["b"]
    return {"b": b.reshape(n, k)[columns] if c["form"] == "nt" else b.reshape(k, n)[:, columns]}
