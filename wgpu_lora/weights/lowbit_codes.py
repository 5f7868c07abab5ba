"""How matrices of low-bit codes are laid out: on the device, in files, and what they represent.

W[o, i] = scale[i // G, o] * table[o, code[o, i]] for tables of 2, 3 or 4 bits, and scale[i // G, o] * code[o, i] for 8
bits. Without groups, tables have no scales, and 8-bit codes have one per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

# The planes of a code, low bits first: how many of its bits each has. A plane's words have whole codes.
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


def entries(bits: int) -> int:
    """The values of a row's table; 0 for 8 bits, which have none."""
    return 2**bits if bits < 8 else 0


def groups(size_in: int, bits: int, group: int) -> int:
    """The scales of a row."""
    return size_in // group if group else 0 if entries(bits) else 1


def word_rows(size_in: int, bits: int) -> int:
    """The words of a row, of all planes."""
    return sum(-(-size_in * plane // 32) for plane in PLANES[bits])


def row_bytes(size_in: int, bits: int) -> int:
    """The bytes of a row in files, of all planes."""
    return sum(-(-size_in * plane // 8) for plane in PLANES[bits])


def constant_count(out: int, size_in: int, bits: int, group: int) -> int:
    """The values of all tables and scales."""
    return out * (entries(bits) + groups(size_in, bits, group))


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes [out, in], from 0 or for 8 bits int8, as in files: uint8 [out, row_bytes].

    Each row has its planes one after the other, in whole bytes. A plane's codes begin in the lowest bits.
    """
    found, first = [], 0
    for plane in PLANES[bits]:
        each, per = (codes.view(np.uint8) >> first) & (2**plane - 1), 8 // plane
        padded = np.zeros((len(codes), -(-codes.shape[1] // per) * per), np.uint8)
        padded[:, : codes.shape[1]] = each
        shifts = (plane * np.arange(per)).astype(np.uint8)
        found.append(np.bitwise_or.reduce(padded.reshape(len(codes), -1, per) << shifts, axis=2))
        first += plane
    return np.concatenate(found, axis=1)


def unpack(packed: np.ndarray, size_in: int, bits: int) -> np.ndarray:
    """Codes uint8 [out, in], or int8 for 8 bits: the inverse of `pack`."""
    codes, first, at = np.zeros((len(packed), size_in), np.uint8), 0, 0
    for plane in PLANES[bits]:
        width, shifts = -(-size_in * plane // 8), (plane * np.arange(8 // plane)).astype(np.uint8)
        values = (packed[:, at : at + width, None] >> shifts) & (2**plane - 1)
        codes |= (values.reshape(len(packed), -1)[:, :size_in] << first).astype(np.uint8)
        first, at = first + plane, at + width
    return codes.view(np.int8) if bits == 8 else codes


def to_words(packed: np.ndarray, size_in: int, bits: int) -> np.ndarray:
    """Converts `pack`'s bytes to the device's layout, uint32 [word_rows, out]: each plane [words, out]."""
    found, at = [], 0
    for plane in PLANES[bits]:
        width, words = -(-size_in * plane // 8), -(-size_in * plane // 32)
        padded = np.zeros((len(packed), 4 * words), np.uint8)
        padded[:, :width] = packed[:, at : at + width]
        found.append(padded.view("<u4").T)
        at += width
    return np.ascontiguousarray(np.concatenate(found))


def from_words(words: np.ndarray, size_in: int, bits: int) -> np.ndarray:
    """`pack`'s bytes, uint8 [out, row_bytes]: the inverse of `to_words`."""
    found, at, out = [], 0, words.shape[1]
    for plane in PLANES[bits]:
        width, count = -(-size_in * plane // 8), -(-size_in * plane // 32)
        rows = np.ascontiguousarray(words[at : at + count].T).astype("<u4").view(np.uint8).reshape(out, 4 * count)
        found.append(_without_padding(rows[:, :width], size_in * plane % 8))
        at += count
    return np.concatenate(found, axis=1)


def _without_padding(rows: np.ndarray, used: int) -> np.ndarray:
    if used:
        rows = rows.copy()
        rows[:, -1] &= 2**used - 1
    return rows


def decode(codes: np.ndarray, table: Any, scales: Any, bits: int) -> np.ndarray:
    """W, float64 [out, in], from codes as `unpack` gives them, table [out, 2^bits] and scales [groups, out] or None."""
    out, size_in = codes.shape
    if entries(bits):
        values = np.take_along_axis(np.asarray(table, np.float64).reshape(out, -1), codes.astype(np.intp), axis=1)
    else:
        values = codes.astype(np.float64)
    if scales is None or not np.size(scales):
        return values
    by_row = np.asarray(scales, np.float64).reshape(-1, out).T
    result: np.ndarray = values * np.repeat(by_row, size_in // by_row.shape[1], axis=1)
    return result


def decode_device(
    words: np.ndarray, constants: np.ndarray, shape: tuple[int, int], bits: int, group: int
) -> np.ndarray:
    """W, float64 [out, in], from the device's words and constants: all tables [out, 2^bits], then all scales [groups,
    out]."""
    out, size_in = shape
    codes = unpack(from_words(words.reshape(-1, out), size_in, bits), size_in, bits)
    return decode(codes, *split_constants(constants, shape, bits, group), bits)


def split_constants(
    constants: np.ndarray, shape: tuple[int, int], bits: int, group: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(table [out, 2^bits], scales [groups, out]) from the device's constants; None for what the scheme has not."""
    out, size_in = shape
    of_tables = (out, entries(bits))
    of_scales = (groups(size_in, bits, group), out)
    flat = constants.reshape(-1)
    tables, scales = flat[: prod(of_tables)], flat[prod(of_tables) :][: prod(of_scales)]
    return tables.reshape(of_tables) if tables.size else None, scales.reshape(of_scales) if scales.size else None


def join_constants(table: np.ndarray | None, scales: np.ndarray | None) -> np.ndarray:
    """The device's constants, flat: the inverse of `split_constants`."""
    parts: Sequence[np.ndarray] = [part.reshape(-1) for part in (table, scales) if part is not None]
    return np.concatenate(parts)
