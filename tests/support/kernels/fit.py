"""Cases of the kernels that fit lookup tables to matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.kernels import Arrays, add, normal, poison, u32
from wgpu_lora.ops.linear import linear
from wgpu_lora.weights.lowbit import kmeans_kernels
from wgpu_lora.weights.lowbit.kmeans_kernels import BINS
from wgpu_lora.weights.lowbit.lowbit_layout import word_rows


def clustered(rng: np.random.Generator, rows: int, size_in: int, count: int) -> np.ndarray:
    """Values around `count` centres, each in the middle of a bin, so that rounding decides nothing."""
    half, even = BINS // 2, np.linspace(-0.95, 0.95, count)
    bins = (half + half * np.sign(even) * np.sqrt(np.abs(even))).astype(int)
    codes = rng.permuted(np.tile(np.arange(size_in) % count, (rows, 1)), axis=1)
    levels = bins[codes] + (rng.integers(-1, 2, codes.shape) if count < 16 else 0)
    levels[:, :2] = 0, BINS - 1
    roots = np.where(levels == 0, -1, np.where(levels == BINS - 1, 1, (levels + 0.5) / half - 1))
    return (np.sign(roots) * roots**2).astype(np.float32)


def fits(rows: int, size_in: int, group: int, bits: int, important: bool) -> None:
    shape: dict[str, Any] = {"rows": rows, "size_in": size_in, "group": group, "bits": bits}

    def make(rng: np.random.Generator, table: bool) -> Arrays:
        arrays: Arrays = {"importance": 0.5 + rng.random(size_in, np.float32)} if important else {}
        spread = np.float32(1)
        if group:
            scales = 0.02 + 0.02 * rng.random((rows, size_in // group), np.float32)
            spread = np.repeat(scales, group, axis=1)
            off = 0.04 if table else 0.0  # which would move values out of the middle of their bins
            arrays["scales"] = (scales * (1 + off * (rng.random(scales.shape, np.float32) - 0.5))).astype(np.float32)
        w = clustered(rng, rows, size_in, 2**bits) * spread
        x = w / spread
        near = np.sort(x, axis=1)[:, (np.arange(2**bits) * size_in + size_in // 2) // 2**bits]
        return {"w": w, "table": near.astype(np.float32) if table else poison(rows, 2**bits), **arrays}

    note = "" if important else "plain"
    add(kmeans_kernels.lut_start, lambda rng: make(rng, False), **shape, note=note)
    add(kmeans_kernels.lut_lloyd, lambda rng: make(rng, True), **shape, iterations=2, note=note)
    if group:
        add(kmeans_kernels.lut_rescale, lambda rng: make(rng, True), **shape, note=note)
        add(
            kmeans_kernels.group_largest,
            lambda rng: {"w": normal(rng, rows, size_in), "scales": poison(rows, size_in // group)},
            size=rows * size_in // group,
            group=group,
        )


def encodes(rows: int, size_in: int, group: int, bits: int) -> None:
    """Values near the middle of what a code stands for, away from thresholds; between columns of others."""
    out, shape = rows + 5, {"rows": rows, "size_in": size_in, "group": group, "bits": bits}

    def make(rng: np.random.Generator) -> Arrays:
        count = size_in // group if group else 1
        scales = 0.5 + rng.random((rows, count), np.float32)
        table = np.sort(rng.permuted(np.tile(np.arange(40), (rows, 1)), axis=1)[:, : 2 ** min(bits, 4)], axis=1)
        codes = (
            rng.integers(0, table.shape[1], (rows, size_in)) if bits < 8 else rng.integers(-130, 131, (rows, size_in))
        )
        x = np.take_along_axis(table, codes, axis=1) if bits < 8 else codes
        spread = np.repeat(scales, size_in // count, axis=1) if group or bits == 8 else np.float32(1)
        w = (x + 0.4 * (rng.random(x.shape) - 0.5)) * spread
        words = rng.integers(0, 2**32, (word_rows(size_in, bits), out), np.uint32)
        arrays: Arrays = {"w": w.astype(np.float32), "codes": words}
        arrays |= {"table": table.astype(np.float32)} if bits < 8 else {}
        return arrays | ({"scales": scales} if group or bits == 8 else {})

    add(kmeans_kernels.lowbit_encode, make, **shape, first=3, out=out)


encodes(rows=5, size_in=96, group=16, bits=3)
encodes(rows=5, size_in=37, group=0, bits=2)
encodes(rows=5, size_in=45, group=0, bits=3)
encodes(rows=5, size_in=64, group=32, bits=4)
encodes(rows=5, size_in=96, group=32, bits=8)
encodes(rows=5, size_in=37, group=0, bits=8)


def of_any_size(rng: np.random.Generator) -> Arrays:
    """Also values between two of f16, in its range of subnormals and beyond its largest."""
    ties = np.float32([1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25, 65519, 65520, -65520, 7e37, -np.inf, np.nan])
    return {
        "x": np.concatenate([normal(rng, 57) * np.float32(4) ** np.arange(-14, 43).clip(max=6), ties]).astype(
            np.float32
        )
    }


add(kmeans_kernels.round_half, of_any_size, size=67)
fits(rows=7, size_in=192, group=32, bits=3, important=True)
fits(rows=5, size_in=131, group=0, bits=2, important=False)
fits(rows=3, size_in=512, group=16, bits=4, important=False)


def observed(first: int) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        return {"x": normal(rng, 40, 37), "count": u32(61), "squares": normal(rng, 37) ** 2}

    add(linear.input_squares, make, rows=40, first=first, cols=37)


observed(first=40)
observed(first=64)
