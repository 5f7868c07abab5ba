"""The names of low-bit base formats: `lut2`, `lut2-g16`, `int8-row`, and mixes by layer kind such as `q2a4`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

KINDS = {2: "lut2", 3: "lut3", 4: "lut4", 8: "int8"}  # by bits
GROUPS = (16, 32, 64)
DEFAULT_GROUP, ROW = 32, 0
ATTENTION = re.compile(r"(^|\.)(\w*attn|attention)(\.|$)")  # in the path of a module

_GROUP = r"(?:-(?:g(?P<group>16|32|64)|(?P<row>row)))?"
_SCHEME = re.compile(rf"(?P<kind>{'|'.join(KINDS.values())}){_GROUP}")
_MIX = re.compile(rf"q(?P<mlp>[2348])a(?P<attention>[2348]){_GROUP}")
PATTERN = rf"(?:{'|'.join(KINDS.values())}|q[2348]a[2348])(?:-(?:g16|g32|g64|row))?"  # of all names


@dataclass(frozen=True)
class Scheme:
    """Codes of 2, 3 or 4 bits with tables, or of 8 bits without. group: inputs that share a scale, or ROW."""

    bits: int
    group: int = DEFAULT_GROUP

    @property
    def name(self) -> str:
        return KINDS[self.bits] + suffix(self.group)

    @classmethod
    def of(cls, name: str) -> Scheme | None:
        """The scheme of this name, or None."""
        match = _SCHEME.fullmatch(name)
        bits = {kind: bits for bits, kind in KINDS.items()}
        return cls(bits[match["kind"]], _group(match)) if match else None


@dataclass(frozen=True)
class Mix:
    """A scheme for the matrices of attention, and another for all others, which are the MLP's."""

    mlp: Scheme
    attention: Scheme

    @property
    def name(self) -> str:
        return f"q{self.mlp.bits}a{self.attention.bits}{suffix(self.mlp.group)}"

    @classmethod
    def of(cls, name: str) -> Mix | None:
        """The mix of this name, or None."""
        match = _MIX.fullmatch(name)
        return cls(*(Scheme(int(match[kind]), _group(match)) for kind in ("mlp", "attention"))) if match else None

    def scheme(self, tensor: str) -> Scheme:
        """The scheme of a matrix, by its name in the checkpoint."""
        return self.attention if ATTENTION.search(tensor) else self.mlp


def suffix(group: int) -> str:
    """The suffix of a group in a name."""
    return "-row" if group == ROW else "" if group == DEFAULT_GROUP else f"-g{group}"


def _group(match: re.Match[str]) -> int:
    return ROW if match["row"] else int(match["group"] or DEFAULT_GROUP)


def format_of(name: str) -> Scheme | Mix:
    """The scheme or mix of this name. Raises ValueError if it is of none."""
    result = Scheme.of(name) or Mix.of(name)
    if result is None:
        raise ValueError(f"{name} is not a low-bit format")
    return result


def scheme_of(base_format: str, tensor: str) -> Scheme:
    """The scheme of a matrix in a low-bit format or mix of this name. Raises ValueError if the name is of none."""
    result = format_of(base_format)
    return result.scheme(tensor) if isinstance(result, Mix) else result


# The planes of a code, low bits first: how many of its bits each has. A plane's words have whole codes.
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


def table_size(bits: int) -> int:
    """The values of a row's table; 0 for 8 bits, which have none."""
    return 2**bits if bits < 8 else 0


def scale_count(size_in: int, bits: int, group: int) -> int:
    """The scales of a row."""
    return size_in // group if group else 0 if table_size(bits) else 1


def word_rows(size_in: int, bits: int) -> int:
    """The words of a row, of all planes."""
    return sum(-(-size_in * plane // 32) for plane in PLANES[bits])


def row_bytes(size_in: int, bits: int) -> int:
    """The bytes of a row in files, of all planes."""
    return sum(-(-size_in * plane // 8) for plane in PLANES[bits])


def constant_count(out: int, size_in: int, bits: int, group: int) -> int:
    """The values of all tables and scales."""
    return out * (table_size(bits) + scale_count(size_in, bits, group))


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes [out, in], from 0 or for 8 bits int8, as in files: uint8 [out, row_bytes].

    Each row has its planes one after the other, in whole bytes. A plane's codes begin in the lowest bits.
    """
    result, first = [], 0
    for plane in PLANES[bits]:
        part, per = (codes.view(np.uint8) >> first) & (2**plane - 1), 8 // plane
        padded = np.zeros((len(codes), -(-codes.shape[1] // per) * per), np.uint8)
        padded[:, : codes.shape[1]] = part
        shifts = (plane * np.arange(per)).astype(np.uint8)
        result.append(np.bitwise_or.reduce(padded.reshape(len(codes), -1, per) << shifts, axis=2))
        first += plane
    return np.concatenate(result, axis=1)


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
    result, at = [], 0
    for plane in PLANES[bits]:
        width, words = -(-size_in * plane // 8), -(-size_in * plane // 32)
        padded = np.zeros((len(packed), 4 * words), np.uint8)
        padded[:, :width] = packed[:, at : at + width]
        result.append(padded.view("<u4").T)
        at += width
    return np.ascontiguousarray(np.concatenate(result))


def from_words(words: np.ndarray, size_in: int, bits: int) -> np.ndarray:
    """`pack`'s bytes, uint8 [out, row_bytes]: the inverse of `to_words`."""
    result, at, out = [], 0, words.shape[1]
    for plane in PLANES[bits]:
        width, count = -(-size_in * plane // 8), -(-size_in * plane // 32)
        rows = np.ascontiguousarray(words[at : at + count].T).astype("<u4").view(np.uint8).reshape(out, 4 * count)
        result.append(_without_padding(rows[:, :width], size_in * plane % 8))
        at += count
    return np.concatenate(result, axis=1)


def _without_padding(rows: np.ndarray, bits: int) -> np.ndarray:
    if bits:
        rows = rows.copy()
        rows[:, -1] &= 2**bits - 1
    return rows


def decode(codes: np.ndarray, table: Any, scales: Any, bits: int) -> np.ndarray:
    """W, float64 [out, in], from codes as `unpack` gives them, table [out, 2^bits] and scales [groups, out] or None."""
    out, size_in = codes.shape
    if table_size(bits):
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
    of_tables = (out, table_size(bits))
    of_scales = (scale_count(size_in, bits, group), out)
    flat = constants.reshape(-1)
    tables, scales = flat[: prod(of_tables)], flat[prod(of_tables) :][: prod(of_scales)]
    return tables.reshape(of_tables) if tables.size else None, scales.reshape(of_scales) if scales.size else None


def join_constants(table: np.ndarray | None, scales: np.ndarray | None) -> np.ndarray:
    """The device's constants, flat: the inverse of `split_constants`."""
    parts: Sequence[np.ndarray] = [part.reshape(-1) for part in (table, scales) if part is not None]
    return np.concatenate(parts)
