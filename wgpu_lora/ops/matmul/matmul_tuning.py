"""Tilings of the matrix products, and how they describe their calls to the tuner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import numpy as np

from wgpu_lora.gpu import reference_values
from wgpu_lora.gpu.kernel import Variants, cdiv
from wgpu_lora.gpu.reference_values import random_values
from wgpu_lora.gpu.tensor import ITEM_BYTES
from wgpu_lora.gpu.tiling import MATRIX, WORKGROUP, Arrays, Capabilities, Constants, Tiling
from wgpu_lora.ops.matmul.matrix_stack import factor_region, join, region, sizes, split

FEW_ROWS = 8
STEPS_IN_F16 = 32  # products that are added in f16, and the shortest rounds
CPU_LANES = 8  # lavapipe's own; with others, its shuffles are slow to run and large tiles slow to compile
THIN_TILES = "thin"  # the family of LoRA's products of few columns
BLOCK = 64  # a part of a product keeps or drops this many columns together, as a block of scales
CHECKED = 64  # rows, columns and steps of the cut that is checked, approximately
ROWS_OF = "a y row_scale a_scale h"  # bindings with a row for each of y's
Operand = Callable[[Constants, np.random.Generator], Arrays]
TakeColumns = Callable[[Arrays, Constants, np.ndarray], Arrays | None]


def large(c: Any, lanes: int) -> tuple[int, int]:
    """(rows, columns per lane) on CPU drivers: a large tile is faster although its sums do not fit the registers, since
    loads cost much more there than moving sums to memory. Products of few columns get more rows instead."""
    if c.form == "tn" and c.m < 8 * lanes:
        return narrow(c.m)
    return (32, 1) if c.n <= lanes else (32, 2) if c.n < 8 * lanes else (16, 8)


def narrow(count: int) -> tuple[int, int]:
    """(ranks of a tile, values of the other side per lane) of a product where one side has few, on CPU drivers."""
    tile = 16 if count % 16 == 0 else 8 * cdiv(count, 8 * cdiv(count, 32))
    return (tile, 8 if tile <= 16 else 4)


def through_workgroup(capabilities: Capabilities, c: Any) -> list[Tiling]:
    """Tilings of the family `workgroup`, for products of many rows that fit a device's registers and memory."""
    if c.form == "tn" or hasattr(c, "slots") or c.m <= 2 * FEW_ROWS:
        return []
    sums = 2 if getattr(c, "gated", False) else 1
    shapes = (64, 8), (128, 8), (64, 4)  # threads, and columns of each
    return [
        Tiling(WORKGROUP, threads, 8, cols, 16)
        for threads, cols in shapes
        if sums * 8 * cols + 72 <= capabilities.registers
    ]


def _matrix_bytes(rows: int, span: int) -> int:
    """Workgroup memory of the family `matrix`: these rows of a and b, each longer by a word, and the table of pairs."""
    return 8 * rows * (span // 4 + 1) + 1024


def on_matrix_units(capabilities: Capabilities, c: Any) -> list[Tiling]:
    """Tilings of the family `matrix`, for products of many rows of f16."""
    unit = capabilities.matrix
    if unit is None or getattr(c, "a_type", "f32") != "f16" or c.form == "tn" or c.m <= 2 * FEW_ROWS:
        return []
    result = []
    for rows, columns, subgroups, span in ((256, 128, 16, 32), (128, 128, 8, 32), (128, 64, 8, 64), (64, 64, 4, 32)):
        if unit.sums == "f16" or _matrix_bytes(rows + columns, span) > capabilities.workgroup_bytes:
            span = STEPS_IN_F16
        tiling = Tiling(MATRIX, subgroups * unit.lanes, span=span, subgroups=subgroups, m=unit.m, n=unit.n, k=unit.k)
        tiling = replace(tiling, rows=rows // tiling.height, cols=columns // tiling.width, sums=unit.sums)
        sums = 3 if getattr(c, "gated", False) else 2
        if (
            tiling.lanes <= capabilities.threads
            and (rows <= 128 or c.m >= rows)
            and _matrix_bytes(rows + columns, span) <= capabilities.workgroup_bytes
            and (capabilities.software or sums * tiling.rows * tiling.cols + 72 <= capabilities.registers)
        ):
            result.append(tiling)
    return result


def tilings(
    span: int, *shapes: tuple[int, int], cpu_span: int | None = None, owners: int = 8, other_registers: int = 0
) -> Variants:
    """Variants with tilings of these (rows, columns per lane), the default first; rounds are multiples of `span` steps.

    On CPU drivers with 64-bit integers and CPU_LANES lanes the default is a `large` tile with rounds of cpu_span steps.

    other_registers: of a lane besides its sums, without 64-bit loads, by the compilers' table (`make gpu-compilers`).
        Tilings that need more than a device has are left out.

    Without subgroups, threads of a GPU load for each other through workgroup memory, which CPU drivers are slow at: on
    those, a workgroup has 32 independent lanes. Products of few rows, as in decoding, get tiles of at most
    that many rows. On a CPU rounds are longer, so that every lane loads part of a. On a GPU the lanes divide the
    contraction of a forward product (the family `few`), since its columns alone are work for a few of the GPU's units.

    owners: lanes that own columns then. Those of an NF4 matrix are neighbours in memory; a dense matrix has a row's
        values side by side, which the slices read together.
    """

    def variants(capabilities: Capabilities, c: Any) -> list[Tiling]:
        size, tile_shapes, steps = capabilities.subgroup_size, shapes, span
        decoding = capabilities.decoding and not capabilities.software  # which has one order of summation for all
        if c.form != "tn" and (c.m <= FEW_ROWS or decoding):
            few = min(FEW_ROWS, 1 << (c.m - 1).bit_length())
            tile_shapes, steps = ((few, 4), (few, 2)), max(span, 32 // few)
        plain = Tiling("plain", 32, rows=min(tile_shapes[0][0], 8), cols=4, span=span)
        matrix = [] if decoding else on_matrix_units(capabilities, c)
        shared = [] if capabilities.software or decoding else through_workgroup(capabilities, c)
        if size not in (4, 8, 16, 32, 64):
            return [*matrix, *shared, plain, replace(plain, cols=2)]
        result = [Tiling("broadcast", size, rows, cols, steps) for rows, cols in tile_shapes]
        if c.form == "nt" and (c.m <= FEW_ROWS or decoding) and not capabilities.software and size > owners:
            # Rounds and slices are the order of summation.
            rounds = span if decoding else span * max(1, 32 // span // few)
            divisions = ((owners, 2), (owners, 4)) if decoding else ((owners, 2), (2 * owners, 2), (owners, 4))
            result = [Tiling("few", size, few, cols, rounds, size // own) for own, cols in divisions if own < size]
        fitting = [tiling for tiling in result if tiling.rows * tiling.cols + other_registers <= capabilities.registers]
        if capabilities.int64:
            wide = [replace(tiling, wide=True) for tiling in (result if capabilities.software else fitting)]
            if capabilities.software and size == CPU_LANES and (c.form == "tn" or c.m > FEW_ROWS):
                wide.insert(0, Tiling("broadcast", size, *large(c, size), cpu_span or span, wide=True))
                if hasattr(c, "slots") and c.n < 8 * size:
                    wide.insert(0, Tiling(THIN_TILES, size, *narrow(c.n), span, wide=True))
            first = capabilities.software or capabilities.registers <= 128  # Apple's GPUs, by the port model
            fitting = [*wide, *fitting] if first else [*fitting, *wide]
        # With 8 x 8 sums of a thread, it has the best bounds on AMD's and NVIDIA's GPUs (`make gpu-compilers`).
        large_first = bool(shared) and c.m >= 64 and shared[0].rows * shared[0].cols == 64
        return [*matrix, *([*shared, *fitting] if large_first else [*fitting, *shared]), plain]

    return variants


def dense_operand(c: Constants, rng: np.random.Generator) -> Arrays:
    """b of a dense product: [n, k] for nt, [k, n] for nn."""
    if c["stacked"]:
        depth, name = (c["k"], "n") if c["form"] == "nt" else (c["n"], "k")
        parts = [region(depth * size, ITEM_BYTES[c["b_type"]]) for size in sizes(c, name)]
        return {"b": random_values(rng, c["b_type"], sum(parts))}
    return {"b": random_values(rng, c["b_type"], *((c["n"], c["k"]) if c["form"] == "nt" else (c["k"], c["n"])))}


def block(tiling: Tiling) -> tuple[int, int]:
    """(rows, columns) of y that a workgroup computes."""
    tile = tiling.rows * tiling.height, tiling.width * tiling.cols
    return (tile[1], tile[0]) if tiling.family == THIN_TILES else tile


@dataclass(frozen=True)
class MatmulTuning:
    """Products of the batch's rows with a frozen matrix, y[m, n] from a[m, k].

    operand: creates the bindings of b, in its format.
    column_unit: the number of b's columns is a multiple of it.
    """

    operand: Operand
    column_unit: Callable[[Constants], int] = lambda c: 1
    sizes: tuple[str, ...] = ("m", "n", "k", "n1", "n2", "k1", "k2")
    later: tuple[str, ...] = ()

    def work(self, c: Constants) -> float:
        return float(c["m"] * sum(sizes(c, "n")) * sum(sizes(c, "k")))

    def cut(self, c: Constants, tiling: Tiling) -> Constants:
        columns = "k" if c["form"] == "nt" else "n"
        small = _smaller_ranges(_fewer(c, tiling, {columns: self.column_unit(c)}), "aywh")
        if not c["rank"]:
            return small
        if c["stacked"] and c["form"] == "nt":  # each part has columns of h
            small["h_skip"] += 4 * cdiv((len(sizes(c, "n")) - 1) * c["rank"], 4)
        return small | {"stride": 4 * cdiv(_factor_values(small), 4) + c["stride"] % 4}

    def inputs(self, c: Constants, present: tuple[str, ...], rng: np.random.Generator) -> Arrays:
        m, width, columns = c["m"], c["n"] + c.get("y_skip", 0), sizes(c, "n")
        by_columns, by_steps = c["stacked"] and c["form"] == "nt", c["stacked"] and c["form"] == "nn"
        steps, flat = sum(region(m * k) for k in sizes(c, "k")), by_columns and not c["gated"]
        arrays = {
            "a": random_values(rng, c["a_type"], *((steps,) if by_steps else (m, c["k"] + c.get("a_skip", 0)))),
            "y": random_values(rng, "f32", *((sum(region(m * n) for n in columns),) if flat else (m, width))),
            "bias": random_values(rng, "f32", sum(map(region, columns)) if by_columns else width),
            "row_scale": random_values(rng, "f32", m),
            "a_scale": random_values(rng, "f32", m),
            "count": np.array([m], np.uint32),
            **self.operand(c, rng),
            **(_factors(c, rng) if c["rank"] else {}),
        }
        return {name: arrays[name] for name in present if name in arrays}


def _smaller_ranges(c: Constants, operands: str) -> Constants:
    """The call with as few columns as possible outside the column ranges of its operands, and the same remainders."""
    small = dict(c)
    for skip, first in ((f"{name}_skip", f"{name}_first") for name in operands if f"{name}_skip" in c):
        small[skip], small[first] = small[skip] % 4, small[first] % 4
        small[skip] += 4 if small[skip] < small[first] else 0
    return small


def _factor_values(c: Constants) -> int:
    """The values of a slot's factor, of all parts."""
    columns, rank = sizes(c, "n"), c["rank"]
    return sum(factor_region(n * rank) for n in columns) if len(columns) > 1 else columns[0] * rank


def _factors(c: Constants, rng: np.random.Generator) -> Arrays:
    """h, and the factors of two slots that share the rows."""
    m, stride = c["m"], c["stride"]
    ranges = np.array([[0, m // 2], [m // 2, m]], np.uint32) + np.uint32(c["first_row"])
    h, factor = random_values(rng, "f32", m, c["rank"] + c["h_skip"]), random_values(rng, "f32", 2, stride)
    return {"h": h, "factor": factor, "ranges": ranges}


@dataclass(frozen=True)
class LoraTuning:
    """LoRA's products, one matrix per slot. rows: the dim of the batch's rows."""

    rows: str = "m"
    sizes: tuple[str, ...] = ("m", "n", "k")
    later: tuple[str, ...] = ()

    def work(self, c: Constants) -> float:
        return float(c["m"] * c["n"] * c["k"])

    def cut(self, c: Constants, tiling: Tiling) -> Constants:
        small = _smaller_ranges(_fewer(c, tiling), "aby")
        return {**small, "stride": 4 * cdiv(_slot_values(small), 4) + c["stride"] % 4}

    def inputs(self, c: Constants, present: tuple[str, ...], rng: np.random.Generator) -> Arrays:
        """Arrays with the rows divided evenly among the slots."""
        m, n, k, slots = c["m"], c["n"], c["k"], c["slots"]
        stacked = random_values(rng, "f32", slots, c["stride"])
        if c["form"] == "tn":
            a, b = (random_values(rng, "f32", k, size) for size in (m + c["a_skip"], n + c["b_skip"]))
            arrays = {"a": a, "b": b, "y": stacked}
        else:
            wide = n + c["y_skip"]
            arrays = {
                "a": random_values(rng, "f32", m, k + c["a_skip"]),
                "b": stacked,
                "y": random_values(rng, "f32", m, wide),
            }
            arrays["scale"] = random_values(rng, "f32", slots, wide)
        bounds = np.linspace(0, c[self.rows], slots + 1).astype(np.uint32)
        arrays["ranges"] = np.stack([bounds[:-1], bounds[1:]], axis=1) + np.uint32(c["first_row"])
        return {name: arrays[name] for name in present}


def _slot_values(c: Constants) -> int:
    return int(c["m"] * c["n"] if c["form"] == "tn" else c["n"] * c["k"])


def _fewer(c: Constants, tiling: Tiling, units: Mapping[str, int] = {}) -> Constants:
    """The call with smaller m, n and k, of each part, of at least two blocks of the tiling each. The remainders are the
    same: by the blocks, so that the same edges are ragged, and by CHECKED, which covers what `divisibility` asks.
    units: of sizes that are multiples of these."""
    rows, columns = block(tiling)
    steps = {"m": rows, "n": columns, "k": tiling.span * tiling.slices}
    names = [(name, steps[name[0]]) for name in ("m", "n", "n1", "n2", "k", "k1", "k2") if name in c]
    sizes = {name: 2 * lcm(CHECKED, step, units.get(name, 1)) for name, step in names}
    return c | {name: reference_values.cut_size(c[name], size) for name, size in sizes.items()}


def product_part(columns: TakeColumns) -> reference_values.TakePart:
    """The parts of products with a frozen matrix: some rows and, where `columns` can take these from b, some columns.

    columns: (arrays, constants, columns of y) -> b's bindings with these columns alone, or None. The columns are whole
        blocks of BLOCK, of which the last may be shorter.
    """

    def take(arrays: Arrays, c: Constants) -> reference_values.Part | None:
        m, n, k = c["m"], sum(sizes(c, "n")), sum(sizes(c, "k"))
        if not reference_values.is_expensive(m * n * k, arrays, n * k):
            return None
        rows = reference_values.evenly_spaced(m, reference_values.ROWS)
        if c.get("gated"):
            return _of_picked_rows(
                reference_values.select_rows(arrays, ROWS_OF, m, rows), {**c, "m": rows.size}, m, rows
            )
        if c["stacked"]:
            key, counts = ("y", sizes(c, "n")) if c["form"] == "nt" else ("a", sizes(c, "k"))
            views = split(arrays[key], [m * count for count in counts])
            selection = {key: join([view.reshape(m, -1)[rows] for view in views])}
            arrays = {
                **reference_values.select_rows({n: a for n, a in arrays.items() if n != key}, ROWS_OF, m, rows),
                **selection,
            }
            c = {**c, "m": rows.size}
            return _of_picked_rows(arrays, c, m, rows)
        arrays, c = _of_picked_rows(
            reference_values.select_rows(arrays, ROWS_OF, m, rows), {**c, "m": rows.size}, m, rows
        )
        blocks = reference_values.evenly_spaced(cdiv(n, BLOCK), reference_values.COLUMN_BLOCKS)
        cols = np.flatnonzero(np.isin(np.arange(n) // BLOCK, blocks))
        b = columns(arrays, c, cols)
        if b is None:
            return arrays, c
        if "factor" in arrays:
            arrays["factor"] = _factor_columns(arrays["factor"], c, cols)
            c["stride"] = c["rank"] * cols.size
        wide = c.get("y_first", 0) + cols
        result = {**arrays, **b, "y": arrays["y"].reshape(rows.size, -1)[:, wide]}
        if "bias" in arrays:
            result["bias"] = arrays["bias"][wide]
        whole: dict[str, Any] = {name: 0 for name in ("y_skip", "y_first", "w_skip", "w_first") if name in c}
        return result, {**c, "n": cols.size, **whole}

    return take


def _of_picked_rows(arrays: Arrays, c: Constants, count: int, rows: np.ndarray) -> reference_values.Part:
    """With the slots' ranges of the picked rows, counted from 0."""
    if "ranges" not in arrays:
        return arrays, c
    ranges = (arrays["ranges"].reshape(-1, 2).astype(int) - c["first_row"]).clip(0, count)
    return {**arrays, "ranges": np.searchsorted(rows, ranges).astype(np.uint32)}, {**c, "first_row": 0}


def _factor_columns(factor: np.ndarray, c: Constants, columns: np.ndarray) -> np.ndarray:
    n, rank = c["n"], c["rank"]
    values = factor.reshape(-1, c["stride"])[:, : n * rank]
    if c["form"] == "nt":
        return values.reshape(-1, n, rank)[:, columns].reshape(len(values), -1)
    return values.reshape(-1, rank, n)[:, :, columns].reshape(len(values), -1)


def dense_columns(arrays: Arrays, c: Constants, columns: np.ndarray) -> Arrays:
    n, k, b = c["n"], c["k"], arrays["b"]
    return {"b": b.reshape(n, k)[columns] if c["form"] == "nt" else b.reshape(k, n)[:, columns]}
