"""NF4 packing on the GPU, from raw rows of a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import U32, Dim, Fixed, In, InOut, Out, Word, kernel, one_per
from wgpu_lora.quant.nf4 import BLOCK, NF4_MIDPOINTS


@kernel("nf4_absmax.wgsl.j2", grid=lambda c: one_per(-(-c.size // BLOCK)), lib=("linear", "half"))
def nf4_absmax(w: Fixed, absmax: Out, *, size: U32, b_type: Word = "f32") -> Any:
    """absmax[b] = max |w| of each block of 64 flattened values; the last may be shorter."""
    flat = np.abs(w.reshape(-1)[:size])
    return np.maximum.reduceat(flat, np.arange(0, size, BLOCK))


@kernel("nf4_encode.wgsl.j2", grid=lambda c: one_per(c.rows * -(-c.size_in // 8)), lib=("linear", "half"))
def nf4_encode(
    w: Fixed, absmax: In, codes: InOut, *, rows: Dim, first: Dim, out: Dim, size_in: Dim, b_type: Word = "f32"
) -> Any:
    """codes[k8, first + n] packs the nearest NF4 codes of w[n, 8 k8 ..], for the `rows` rows that w holds."""
    scale = 1 / np.maximum(np.repeat(absmax, BLOCK)[: rows * size_in], 1e-38)
    nearest = np.searchsorted(NF4_MIDPOINTS.astype(np.float64), w.reshape(-1)[: rows * size_in] * scale)
    padded = np.zeros((rows, -(-size_in // 8) * 8), np.uint64)
    padded[:, :size_in] = nearest.reshape(rows, size_in)
    words = (padded.reshape(rows, -1, 8) << (4 * np.arange(8, dtype=np.uint64))).sum(axis=2)
    result = codes.reshape(-1, out).copy()
    result[:, first : first + rows] = words.T
    return result
