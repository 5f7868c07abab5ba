"""Cases of the kernels that fit lookup tables to matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.kernels import Arrays, add, normal, poison
from wgpu_lora.weights import fit_kernels
from wgpu_lora.weights.fit_kernels import BINS


def clustered(rng: np.random.Generator, rows: int, size_in: int, count: int) -> np.ndarray:
    """Values around `count` centres, each in the middle of a bin, so that rounding decides nothing."""
    bins = 1 + np.rint(np.arange(count) * (BINS - 3) / (count - 1)).astype(int)
    codes = rng.permuted(np.tile(np.arange(size_in) % count, (rows, 1)), axis=1)
    chosen = bins[codes] + rng.integers(-1, 2, codes.shape)
    chosen[:, :2] = 0, BINS - 1
    half = BINS // 2
    roots = np.where(chosen == 0, -1, np.where(chosen == BINS - 1, 1, (chosen + 0.5) / half - 1))
    return (np.sign(roots) * roots**2).astype(np.float32)


def fits(rows: int, size_in: int, group: int, bits: int, important: bool) -> None:
    shape: dict[str, Any] = {"rows": rows, "size_in": size_in, "group": group, "bits": bits}

    def make(rng: np.random.Generator, table: bool) -> Arrays:
        found: Arrays = {"importance": 0.5 + rng.random(size_in, np.float32)} if important else {}
        spread = np.float32(1)
        if group:
            scales = 0.02 + 0.02 * rng.random((rows, size_in // group), np.float32)
            spread = np.repeat(scales, group, axis=1)
            off = 0.04 if table else 0.0  # which would move values out of the middle of their bins
            found["scales"] = (scales * (1 + off * (rng.random(scales.shape, np.float32) - 0.5))).astype(np.float32)
        w = clustered(rng, rows, size_in, 2**bits) * spread
        x = w / spread
        near = np.sort(x, axis=1)[:, (np.arange(2**bits) * size_in + size_in // 2) // 2**bits]
        return {"w": w, "table": near.astype(np.float32) if table else poison(rows, 2**bits), **found}

    note = "" if important else "plain"
    add(fit_kernels.lut_start, lambda rng: make(rng, False), **shape, note=note)
    add(fit_kernels.lut_lloyd, lambda rng: make(rng, True), **shape, iterations=2, note=note)
    if group:
        add(fit_kernels.lut_rescale, lambda rng: make(rng, True), **shape, note=note)
        add(
            fit_kernels.group_largest,
            lambda rng: {"w": normal(rng, rows, size_in), "scales": poison(rows, size_in // group)},
            size=rows * size_in // group,
            group=group,
        )


add(fit_kernels.round_half, lambda rng: {"x": normal(rng, 67)}, size=67)
fits(rows=7, size_in=192, group=32, bits=3, important=True)
fits(rows=5, size_in=131, group=0, bits=2, important=False)
fits(rows=3, size_in=512, group=16, bits=4, important=False)
