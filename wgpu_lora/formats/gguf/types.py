"""Packs values into GGML types."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, quants
from gguf.constants import GGMLQuantizationType

from wgpu_lora.formats.gguf.kquants import quantize_k

Q = GGMLQuantizationType
K_BITS = {Q.Q4_K: 4, Q.Q5_K: 5, Q.Q6_K: 6}


def nbytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    """Size in bytes of a tensor whose last dimension is whole blocks of its type."""
    block, size = GGML_QUANT_SIZES[kind]
    return int(np.prod(shape, dtype=np.int64)) // block * size


def pack(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Packs float32 rows, which must be whole blocks of the type, into bytes."""
    if kind in K_BITS:
        return quantize_k(values, K_BITS[kind])
    return quants.quantize(values, kind)
