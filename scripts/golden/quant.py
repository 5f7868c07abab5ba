"""NF4 by bitsandbytes on the CPU, and matrices on which its answer is beyond doubt."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import numpy as np
import torch

from wgpu_lora.weights.nf4 import nf4_reference as nf4


def quantize(w: np.ndarray) -> dict[str, np.ndarray]:
    """bitsandbytes' double-quantised NF4 of a float32 matrix: codes, absmax codes, nested absmax, offset, values.

    The matrix goes in flattened. The codes are the same either way, but where AVX-512 is at hand, bitsandbytes' CPU
    kernel finds the absmax of a 2-D matrix by row, which is wrong when a block of 64 spans two rows.
    """
    packed, state = bnb.quantize_4bit(torch.from_numpy(w.reshape(-1)), quant_type="nf4", compress_statistics=True)
    codes = packed.numpy().reshape(-1)
    absmax = nf4.double_dequantize(state.absmax.numpy(), state.state2.absmax.numpy(), state.offset.item())
    if w.size % 2:
        # bitsandbytes would compile a torch kernel for an odd count; the formula is the same
        values = nf4.dequantize_nf4(nf4.unpack_bnb(codes, w.size), absmax)
    else:
        values = bnb.dequantize_4bit(packed, state).numpy()
    return {
        "codes": codes,
        "absmax_codes": state.absmax.numpy(),
        "nested_absmax": state.state2.absmax.numpy(),
        "offset": state.offset.numpy().reshape(1),
        "dequantised": values.reshape(w.shape),
    }


def is_clear_cut(w: np.ndarray) -> bool:
    """Whether no value lies so near a threshold that rounding, or bitsandbytes' look-up table, decides its code.

    On such a matrix every correct quantiser, on whatever device, gives exactly the same codes.
    """
    codes, absmax = nf4.quantize_nf4(w)
    peak = np.maximum(absmax.astype(np.float64), 1e-38)  # a block of zeros is clear-cut too
    scaled = w.reshape(-1).astype(np.float64) / np.repeat(peak, nf4.BLOCK)[: w.size]
    centred = absmax.astype(np.float64) - absmax.mean(dtype=np.float64)
    peaks = np.maximum.reduceat(np.abs(centred), np.arange(0, centred.size, nf4.NESTED_BLOCK))
    nested = centred / np.repeat(peaks, nf4.NESTED_BLOCK)[: centred.size]
    golden = quantize(w)
    return bool(
        _distance(scaled, nf4.NF4_MIDPOINTS) > 5e-7
        and _distance(nested, nf4.DYNAMIC_MIDPOINTS) > 4e-6
        and np.array_equal(nf4.pack_bnb(codes), golden["codes"])
        and np.array_equal(nf4.double_quantize(absmax)[0], golden["absmax_codes"])
    )


def _distance(values: np.ndarray, thresholds: np.ndarray) -> float:
    return float(np.abs(values[:, None] - thresholds[None, :].astype(np.float64)).min())
