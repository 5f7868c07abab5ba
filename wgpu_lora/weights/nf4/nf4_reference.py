"""NF4 with double quantisation as bitsandbytes stores it: the NumPy reference.

A block of 64 weights shares one `absmax`; each weight is a 4-bit index into NF4_CODE, scaled by it. The absmax values
are quantised too: their mean is subtracted, and blocks of 256 share one `nested_absmax` with 8-bit indices into
DYNAMIC_CODE.

How bitsandbytes 0.50.2 chooses a code (`backends/default/ops.py: quantize_4bit` on the CPU, and
`csrc/kernels.cu: dQuantizeNF4` for CUDA):

- scaled = clip(w * (1 / absmax), -1, 1) in float32, with the reciprocal rounded before the product. The last,
  incomplete block of the default implementation divides instead (w / absmax), with absmax at least 1e-38.
- code = the number of the 15 float32 midpoints between neighbouring code values that are < scaled, so a value on a
  midpoint gets the lower code. CUDA's literal thresholds are the same midpoints.
- In a block of zeros every code is 7 (the value 0).

For the absmax values (`functional.py: quantize_blockwise`), offset = mean(absmax), and the code is the nearest of the
256 code values to (absmax - offset) * (1 / nested_absmax). CUDA searches exactly (`dQuantize`, with midpoints), as
this module does. The CPU build (`csrc/cpu_ops.cpp: norm_to_lut_index`) rounds the value to one of 65,536 steps over
[-1, 1] and looks up the code: near a midpoint it may differ by one, and near zero, where codes are finer than steps,
by up to four.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NAME = "nf4"
BLOCK = 64
NESTED_BLOCK = 256
# Arrays of a matrix [out, in] in files: codes uint8 [ceil(out * in / 2)] packed by `pack_bnb`, and either absmax f32
# [blocks] or, with double quantisation, codes uint8 [blocks] and nested f32 [ceil(blocks / 256) + 1], whose last entry
# is the offset.
PARTS = ("codes", "absmax", "nested")

# Quantiles of N(0, 1), normalised: the QLoRA paper's appendix E, and `get_4bit_type` of bitsandbytes.
NF4_CODE = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    dtype=np.float32,
)


def _dynamic_code() -> np.ndarray:
    """The signed dynamic tree of Dettmers (arXiv 1511.04561), 7 exponent bits: float32 [256], ascending.

    Decade e (from 10^-6 to 1) has the midpoints of 2^e equal parts of [0.1, 1], with both signs. With 0 and 1 these
    are 2 * (1 + 2 + ... + 64) + 2 = 256 values.
    """
    values = [0.0, 1.0]
    for e in range(7):
        # Bit for bit as torch.linspace: a float32 step, counted from the nearer end, each edge rounded once.
        step, i = np.float64(np.float32(np.float32(1.0) - np.float32(0.1)) / np.float32(2**e)), np.arange(2**e + 1)
        rising, falling = np.float64(np.float32(0.1)) + step * i, 1.0 - step * i[::-1]
        edges = np.where(i < (2**e + 1) // 2, rising, falling).astype(np.float32)
        means = (edges[:-1] + edges[1:]) / np.float32(2)
        scaled = np.float32(10.0 ** (e - 6)) * means
        values += [*scaled.tolist(), *(-scaled).tolist()]
    return np.array(sorted(values), dtype=np.float32)


DYNAMIC_CODE = _dynamic_code()


def _midpoints(code: np.ndarray) -> np.ndarray:
    middle: np.ndarray = (code[:-1] + code[1:]) / np.float32(2)
    return middle


NF4_MIDPOINTS = _midpoints(NF4_CODE)
DYNAMIC_MIDPOINTS = _midpoints(DYNAMIC_CODE)


def quantize_nf4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantises flattened weights in blocks of BLOCK; the last block may be shorter.

    Returns (codes uint8 [n] in 0..15, absmax float32 [ceil(n / BLOCK)]).
    """
    return _quantize(w, NF4_MIDPOINTS, BLOCK)


def dequantize_nf4(codes: np.ndarray, absmax: np.ndarray) -> np.ndarray:
    """float32 [n] from codes uint8 [n] and absmax float32 [ceil(n / BLOCK)]."""
    values: np.ndarray = NF4_CODE[codes] * _spread(absmax, BLOCK, codes.size)
    return values


def double_quantize(absmax: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Quantises the absmax values of a tensor to 8 bits, in blocks of NESTED_BLOCK.

    Returns (codes uint8 [n], nested_absmax float32 [ceil(n / NESTED_BLOCK)], offset), where the offset is the mean of
    `absmax`. It is summed in float64; bitsandbytes sums in float32, so its offset may differ in the last bit.
    """
    offset = np.float32(absmax.mean(dtype=np.float64))
    codes, nested_absmax = _quantize(absmax - offset, DYNAMIC_MIDPOINTS, NESTED_BLOCK)
    return codes, nested_absmax, offset


def double_dequantize(codes: np.ndarray, nested_absmax: np.ndarray, offset: np.float32 | float) -> np.ndarray:
    """The absmax values, float32 [n]: the inverse of `double_quantize`."""
    centred: np.ndarray = DYNAMIC_CODE[codes] * _spread(nested_absmax, NESTED_BLOCK, codes.size)
    return centred + np.float32(offset)


def round_trip(w: np.ndarray) -> np.ndarray:
    """`w` quantised to double-quantised NF4 and back: float32, in the same shape."""
    codes, absmax = quantize_nf4(w)
    return dequantize_nf4(codes, double_dequantize(*double_quantize(absmax))).reshape(w.shape)


def decode_parts(parts: Sequence[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """W, float32 [out, in], from its arrays in files, in the order of PARTS."""
    codes, absmax, *nested = parts
    if nested:
        absmax = double_dequantize(absmax, nested[0][:-1], nested[0][-1])
    return dequantize_nf4(unpack_bnb(codes, shape[0] * shape[1]), absmax).reshape(shape)


def decode_words(words: np.ndarray, scales: np.ndarray, out: int, size_in: int) -> np.ndarray:
    """W, float64 [out, in], from device words [ceil(in / 8), out] and one scale per 64 flattened values."""
    nibbles = (words.reshape(-1, out).astype(np.uint64)[:, :, None] >> (4 * np.arange(8, dtype=np.uint64))) & 15
    values: np.ndarray = NF4_CODE.astype(np.float64)[nibbles].transpose(1, 0, 2).reshape(out, -1)[:, :size_in]
    block = np.arange(out * size_in).reshape(out, size_in) // BLOCK
    values *= scales.astype(np.float64).reshape(-1)[block]
    return values


def pack_bnb(codes: np.ndarray) -> np.ndarray:
    """Packs codes uint8 [n] into bytes uint8 [ceil(n / 2)], the first code in the high nibble.

    An odd count is padded with code 7 (the value 0).
    """
    if codes.size % 2:
        codes = np.append(codes, np.uint8(7))
    packed: np.ndarray = codes[::2] << 4 | codes[1::2]
    return packed.astype(np.uint8)


def unpack_bnb(packed: np.ndarray, count: int) -> np.ndarray:
    """The first `count` codes, uint8 [count]: the inverse of `pack_bnb`."""
    return np.stack([packed.reshape(-1) >> 4, packed.reshape(-1) & 15], axis=1).reshape(-1)[:count]


def to_words(packed: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Converts `pack_bnb`'s bytes of a matrix [out, in] to the device's layout, uint32 [ceil(in / 8), out].

    A word has eight codes along `in`, the first in the low nibble.
    """
    out, size_in = shape
    if size_in % 8 == 0:
        swapped = (packed >> 4) | (packed << 4)
        return np.ascontiguousarray(swapped.reshape(out, size_in // 2).view("<u4").T)
    codes = np.zeros((out, -(-size_in // 8) * 8), np.uint32)
    codes[:, :size_in] = unpack_bnb(packed, out * size_in).reshape(out, size_in)
    words = (codes.reshape(out, -1, 8) << (4 * np.arange(8, dtype=np.uint32))).sum(axis=2, dtype=np.uint32)
    return np.ascontiguousarray(words.T)


def from_words(words: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """`pack_bnb`'s bytes, uint8 [ceil(out * in / 2)]: the inverse of `to_words`."""
    out, size_in = shape
    if size_in % 8 == 0:
        swapped = np.ascontiguousarray(words.reshape(-1, out).T).astype("<u4").view(np.uint8).reshape(-1)
        return (swapped >> 4) | (swapped << 4)
    nibbles = (words.reshape(-1, out).T[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    return pack_bnb(nibbles.reshape(out, -1)[:, :size_in].reshape(-1).astype(np.uint8))


def _quantize(x: np.ndarray, midpoints: np.ndarray, blocksize: int) -> tuple[np.ndarray, np.ndarray]:
    flat = np.asarray(x, dtype=np.float32).reshape(-1)
    if not flat.size:
        return np.zeros(0, np.uint8), np.zeros(0, np.float32)
    absmax = np.maximum.reduceat(np.abs(flat), np.arange(0, flat.size, blocksize))
    # the lower limit keeps a block of zeros finite: 0 * 1e38 is 0
    reciprocal = np.float32(1) / np.maximum(absmax, np.float32(1e-38))
    scaled = np.clip(flat * _spread(reciprocal, blocksize, flat.size), np.float32(-1), np.float32(1))
    return np.searchsorted(midpoints, scaled, side="left").astype(np.uint8), absmax


def _spread(per_block: np.ndarray, blocksize: int, count: int) -> np.ndarray:
    return np.repeat(per_block, blocksize)[:count]
