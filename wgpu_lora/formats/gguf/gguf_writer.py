"""Writes a GGUF file tensor by tensor, which appears only once it is complete, and packs K-quants for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter, quants
from gguf.constants import GGMLQuantizationType

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import check_new, new_file
from wgpu_lora.names.spelling import flag

# Name -> (shape, its type in each file, pieces: the bytes for each file).
Pieces = Callable[[], Iterator[Sequence[np.ndarray]]]
Tensors = dict[str, tuple[tuple[int, ...], Sequence[GGMLQuantizationType], Pieces]]


def check_new_gguf(output: Path) -> None:
    """Raises UserError if `output` exists, or is not a suitable path."""
    check_new(output, flag("output"))
    if output.suffix.lower() != ".gguf":
        raise UserError(f"{output} does not end in .gguf: add the extension, which other programs expect.")


@contextmanager
def new_gguf(output: Path, architecture: str) -> Iterator[GGUFWriter]:
    """A writer for a temporary file that becomes `output` on success, and is removed on failure."""
    with new_file(output, flag("output")) as temporary:
        writer = GGUFWriter(temporary, architecture)
        try:
            yield writer
            writer.close()
        except BaseException:
            with suppress(OSError):  # closing flushes the buffer, which may fail again
                writer.close()
            raise


def write_tensors(writers: Sequence[GGUFWriter], tensors: Tensors) -> None:
    """Writes the headers, the metadata and the tensors of several files at once, piece by piece."""
    for number, writer in enumerate(writers):
        for name, (shape, kinds, _) in tensors.items():
            size = nbytes(shape, kinds[number])
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kinds[number])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        file = _file(writer)
        writer.write_padding(file, file.tell())
    for name, (shape, kinds, pieces) in tensors.items():
        counts = [0] * len(writers)
        for piece in pieces():
            for number, (writer, values) in enumerate(zip(writers, piece, strict=True)):
                counts[number] += _file(writer).write(np.ascontiguousarray(values).data)
        for writer, count, kind in zip(writers, counts, kinds, strict=True):
            if count != nbytes(shape, kind):
                raise ValueError(f"{name}: got {count} bytes, expected {nbytes(shape, kind)}")
            writer.write_padding(_file(writer), count)


def _file(writer: GGUFWriter) -> BinaryIO:
    assert writer.fout is not None
    (file,) = writer.fout
    return cast("BinaryIO", file)


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


# -- K-quants: Q4_K, Q5_K and Q6_K super-blocks of 256 values, in NumPy ------------------------------------------------
#
# A super-block has short blocks with small integer scales, which are multiples of half floats. The scale of each block
# is searched on a grid: for each step, values are rounded to codes, the scale is refitted by weighted least squares,
# and the one with the smallest error is kept. Large values have larger weights.

SUPER = 256  # values per super-block
CHUNK = 1024  # super-blocks at a time, so that the search stays in the CPU's cache
THREADS = min(8, os.cpu_count() or 1)
F16_MAX = np.float32(65504.0)
# Steps to try, as levels more (a finer step, with clipped codes) or fewer than available.
STRETCH_AFFINE = np.linspace(-1, 1.1, 22, dtype=np.float32)
REFITS = 2  # further rounds of rounding and fitting for the best step
STRETCH_SYMMETRIC = np.linspace(-0.9, 0.9, 13, dtype=np.float32)


def quantize_k(rows: np.ndarray, bits: int) -> np.ndarray:
    """Packs finite float32 rows [n, 256 k] as Q4_K, Q5_K or Q6_K (by `bits`): uint8 [n, k * 144, 176 or 210]."""
    pack = _pack_q6 if bits == 6 else lambda blocks: _pack_affine(blocks, bits)
    blocks = rows.reshape(-1, SUPER)
    starts = range(0, len(blocks), CHUNK)
    with ThreadPoolExecutor(THREADS) as pool:  # NumPy releases the GIL
        parts = list(pool.map(lambda start: pack(blocks[start : start + CHUNK]), starts))
    return np.concatenate(parts).reshape(len(rows), -1)


def _pack_affine(blocks: np.ndarray, bits: int) -> np.ndarray:
    """Q4_K and Q5_K, x = d scale code - dmin minimum: [n, 256] -> uint8 [n, 144 or 176]."""
    levels = 2**bits - 1
    columns = _columns(blocks, 32)
    scales, minima = (values.reshape(-1, 8) for values in _fit_affine(columns, levels))
    d, scale_codes = _halves(scales, 63)
    dmin, minimum_codes = _halves(minima, 63)
    step, minimum = (d * scale_codes).reshape(-1), (dmin * minimum_codes).reshape(-1)
    codes = np.clip(np.rint((columns + minimum) * _inverse(step)), 0, levels).astype(np.uint8)
    codes = np.ascontiguousarray(codes.T).reshape(-1, 8, 32)
    nibbles = codes & 15
    parts: list[np.ndarray] = [d.astype(np.float16).view(np.uint8), dmin.astype(np.float16).view(np.uint8)]
    parts.append(_six_bit_pairs(scale_codes.astype(np.uint8), minimum_codes.astype(np.uint8)))
    if bits == 5:
        fifth = (codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]
        parts.append(np.bitwise_or.reduce(fifth, axis=1))
    parts.append((nibbles[:, 0::2] | nibbles[:, 1::2] << 4).reshape(-1, 128))
    return np.concatenate(parts, axis=1)


def _pack_q6(blocks: np.ndarray) -> np.ndarray:
    """Q6_K, x = d scale code: [n, 256] -> uint8 [n, 210]."""
    columns = _columns(blocks, 16)
    scales = _fit_symmetric(columns, 32).reshape(-1, 16)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=1, keepdims=True), axis=1)
    # The largest scale becomes -128, the integer of the largest magnitude.
    d = _half(largest / np.float32(-128))
    scale_codes = np.clip(np.rint(scales * _inverse(d)), -128, 127)
    step = (d * scale_codes).reshape(-1)
    codes = (np.clip(np.rint(columns * _inverse(step)), -32, 31) + 32).astype(np.uint8)
    codes = np.ascontiguousarray(codes.T).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    ql = low[:, :, :2] | low[:, :, 2:] << 4
    qh = np.bitwise_or.reduce(high << np.array([[0], [2], [4], [6]], np.uint8), axis=2)
    n = len(blocks)
    integers = scale_codes.astype(np.int8).view(np.uint8)
    return np.concatenate(
        [ql.reshape(n, 128), qh.reshape(n, 64), integers, d.astype(np.float16).view(np.uint8)], axis=1
    )


def _fit_affine(x: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Fits x = scale * code - minimum to each column of x [32, n]; returns (scale, minimum >= 0), each [n]."""
    minimum = np.minimum(x.min(axis=0), 0)
    above = x - minimum
    span = above.max(axis=0)
    w = np.abs(x) + np.sqrt(np.einsum("ij,ij->j", x, x) / np.float32(len(x)))
    wx = w * x
    sw, swx, swxx = w.sum(axis=0), wx.sum(axis=0), np.einsum("ij,ij->j", wx, x)
    best_scale, best_offset = span / np.float32(levels), minimum
    best_error = np.full(x.shape[1], np.inf, np.float32)
    per_span = _inverse(span)
    q, wq = np.empty_like(x), np.empty_like(x)
    for stretch in (*STRETCH_AFFINE, *[None] * REFITS):
        if stretch is None:  # codes of the best so far
            np.multiply(x - best_offset, _inverse(best_scale), out=q)
        else:
            np.multiply(above, (levels + stretch) * per_span, out=q)
        np.rint(q, out=q)
        np.clip(q, 0, np.float32(levels), out=q)
        np.multiply(w, q, out=wq)
        sq, sqq, sxq = wq.sum(axis=0), np.einsum("ij,ij->j", wq, q), np.einsum("ij,ij->j", wx, q)
        over = _inverse(sw * sqq - sq * sq)
        scale, offset = (sw * sxq - swx * sq) * over, (sqq * swx - sq * sxq) * over
        beyond = offset > 0  # minima are unsigned
        offset = np.where(beyond, np.float32(0), offset)
        scale = np.where(beyond, sxq * _inverse(sqq), scale)
        error = swxx + scale * (scale * sqq - 2 * sxq) + offset * (offset * sw - 2 * swx + 2 * scale * sq)
        better = (error < best_error) & (over > 0)
        best_scale = np.where(better, scale, best_scale)
        best_offset = np.where(better, offset, best_offset)
        best_error = np.where(better, error, best_error)
    return best_scale, -best_offset


def _fit_symmetric(x: np.ndarray, half: int) -> np.ndarray:
    """Fits x = scale * code, with codes in [-half, half), to each column of x [16, n]; returns the scales [n]."""
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=0, keepdims=True), axis=0)[0]
    per_peak = -_inverse(peak)
    wx = np.abs(x) * x
    w = np.abs(x)
    best_scale, best_gain = -peak / np.float32(half), np.full(x.shape[1], -np.inf, np.float32)
    q = np.empty_like(x)
    for stretch in STRETCH_SYMMETRIC:
        np.multiply(x, (half + stretch) * per_peak, out=q)
        np.rint(q, out=q)
        np.clip(q, -half, half - 1, out=q)
        sxq = np.einsum("ij,ij->j", wx, q)
        np.multiply(q, q, out=q)
        over = _inverse(np.einsum("ij,ij->j", w, q))
        scale = sxq * over
        gain = scale * sxq  # reduction of the weighted squared error
        better = gain > best_gain
        best_scale = np.where(better, scale, best_scale)
        best_gain = np.where(better, gain, best_gain)
    return best_scale


def _columns(blocks: np.ndarray, size: int) -> np.ndarray:
    """Short blocks as columns, which is faster for sums: [n, 256] -> [size, n * 256 / size]."""
    return np.ascontiguousarray(blocks.reshape(-1, size).T)


def _halves(values: np.ndarray, maximum: int) -> tuple[np.ndarray, np.ndarray]:
    """Non-negative rows [n, 8] as a half-precision unit [n, 1] and integers up to `maximum`, both in float32."""
    unit = _half(values.max(axis=1, keepdims=True) / np.float32(maximum))
    return unit, np.minimum(np.rint(np.maximum(values, 0) * _inverse(unit)), np.float32(maximum))


def _half(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -F16_MAX, F16_MAX).astype(np.float16).astype(np.float32)


def _inverse(values: np.ndarray) -> np.ndarray:
    """1 / x, or 0 if x is 0 or too small to have an inverse."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / values
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _six_bit_pairs(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Packs eight 6-bit scales and minima, [n, 8] each, into 12 bytes; the last four use nibbles and the top bits."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate([first, second, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], axis=1)
