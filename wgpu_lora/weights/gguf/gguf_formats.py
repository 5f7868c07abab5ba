"""The quantised types of GGUF files: the bits of a block, their layout on the device, and the float64 reference.

A row is blocks of 32 or 256 values. A value is `scale * levels[code] + minimum`, where groups of `group` values share
scale and minimum (ggml's `ggml-common.h` and `dequantize_row_*`). Products of a half float, an integer scale and a code
are exact in f32, so all ways to compute a value round at most once and give ggml's bits.

On the device a matrix [out, in] has

- codes: u32 [rows, out]. The bits of a code are in planes, one after another. A word of a plane has its bits of
  neighbours along `in`, the first in the lowest bits.
- scales: u32 [rows, out]. First the words of each block that the format copies, then, if blocks have a single half
  float, those of two blocks in a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

Scales = tuple[np.ndarray, np.ndarray | None]  # scale and minimum of each group, float64 [in / group, out]


@dataclass(frozen=True)
class Plane:
    """`bits` of each code, in the bytes of a block from `offset` on.

    stride: codes of neighbouring bytes. A run of 8 / bits times as many has its first codes in the lowest bits of the
        bytes, then the next in the bits above. 1 if neighbours share a byte.
    """

    bits: int
    offset: int
    stride: int


@dataclass(frozen=True)
class GGUFFormat:
    """A quantised type.

    words: the offsets of words of a block that are copied to the scales. half: the offset of a half float, of which two
        blocks share a word; None if there is none. half_offsets: the offsets of all half floats of a block.
    group: values that share a scale. levels: a code's value, before it is scaled.
    of_words: the blocks' words [blocks, words, out] and half floats, float64 [blocks, out], -> scales and minima.
    """

    name: str
    planes: tuple[Plane, ...]
    group: int
    levels: tuple[int, ...]
    of_words: Callable[[np.ndarray, np.ndarray], Scales]
    half_offsets: tuple[int, ...] = (0,)
    words: tuple[int, ...] = ()
    half: int | None = None

    @property
    def kind(self) -> GGMLQuantizationType:
        return GGMLQuantizationType[self.name.upper()]

    @property
    def block(self) -> int:
        """Values of a block."""
        return int(GGML_QUANT_SIZES[self.kind][0])

    @property
    def block_bytes(self) -> int:
        return int(GGML_QUANT_SIZES[self.kind][1])

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.block_bytes / self.block

    @property
    def codebook(self) -> bool:
        """Whether a level is looked up."""
        return self.levels is IQ4

    def code_rows(self, size_in: int) -> int:
        """Rows of the codes of a matrix [out, size_in]."""
        result: int = sum(size_in * plane.bits // 32 for plane in self.planes)
        return result

    def scale_rows(self, size_in: int) -> int:
        """Rows of the scales of a matrix [out, size_in]."""
        blocks = size_in // self.block
        return blocks * len(self.words) + (0 if self.half is None else -(-blocks // 2))

    def to_words(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The codes and scales of a file's rows, uint8 [out, bytes]."""
        blocks = rows.reshape(len(rows), -1, self.block_bytes)
        i, codes, scales = np.arange(self.block), [], []
        for plane in self.planes:
            per = 8 // plane.bits
            offsets = plane.offset + i // (plane.stride * per) * plane.stride + i % plane.stride
            bits = blocks[:, :, offsets] >> (plane.bits * (i // plane.stride % per)).astype(np.uint8)
            parts = (bits & (2**plane.bits - 1)).reshape(len(rows), -1, 32 // plane.bits).astype(np.uint32)
            codes.append((parts << (plane.bits * np.arange(32 // plane.bits, dtype=np.uint32))).sum(2, dtype=np.uint32))
        if self.words:
            copied = blocks[:, :, np.add.outer(self.words, range(4)).ravel()]
            scales.append(np.ascontiguousarray(copied).view("<u4").reshape(len(rows), -1))
        if self.half is not None:
            halves = np.zeros((len(rows), -(-blocks.shape[1] // 2) * 4), np.uint8)
            halves[:, : 2 * blocks.shape[1]] = blocks[:, :, self.half : self.half + 2].reshape(len(rows), -1)
            scales.append(halves.view("<u4"))
        return np.concatenate(codes, axis=1).T, np.concatenate(scales, axis=1).T

    def decode(self, codes: np.ndarray, scales: np.ndarray, out: int, size_in: int) -> np.ndarray:
        """W, float64 [out, in], from the device's words."""
        words, first = codes.reshape(-1, out), 0
        code, shift = np.zeros((size_in, out), np.uint32), 0
        for plane in self.planes:
            rows, per = size_in * plane.bits // 32, 32 // plane.bits
            offsets = (plane.bits * np.arange(per, dtype=np.uint32))[:, None]
            bits = words[first : first + rows, None] >> offsets & np.uint32(2**plane.bits - 1)
            code |= bits.reshape(size_in, out) << np.uint32(shift)
            first, shift = first + rows, shift + plane.bits
        scale, minimum = self.of_words(*self._split(scales.reshape(-1, out), size_in // self.block))
        values = np.array(self.levels, np.float64)[code].reshape(-1, self.group, out) * scale[:, None]
        if minimum is not None:
            values += minimum[:, None]
        return values.reshape(size_in, out).T

    def _split(self, scales: np.ndarray, blocks: int) -> tuple[np.ndarray, np.ndarray]:
        copied, out = blocks * len(self.words), scales.shape[1]
        halves = np.stack(_halves(scales[copied:]), axis=1).reshape(-1, out)[:blocks]
        return scales[:copied].reshape(blocks, len(self.words), out), halves

    def finite(self, rows: np.ndarray) -> bool:
        """Whether the half floats of a file's rows, uint8 [rows, bytes], are finite."""
        blocks = rows.reshape(-1, self.block_bytes)
        return all((blocks[:, offset + 1] & 0x7C != 0x7C).all() for offset in self.half_offsets)


def _halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two half floats of words, float64."""
    low, high = (words & 0xFFFF).astype(np.uint16), (words >> 16).astype(np.uint16)
    return low.view(np.float16).astype(np.float64), high.view(np.float16).astype(np.float64)


def _single(words: np.ndarray, halves: np.ndarray) -> Scales:
    return halves, None


def _scale_and_minimum(words: np.ndarray, halves: np.ndarray) -> Scales:
    return _halves(words[:, 0])


def _six_bits(words: np.ndarray, halves: np.ndarray) -> Scales:
    """Q4_K and Q5_K: 8 scales and minima of 6 bits, of which the last four use nibbles and the others' top bits."""
    d, dmin = (half[:, None] for half in _halves(words[:, 0]))
    first, second, third = (
        words[:, 1 + i, None] >> np.array([0, 8, 16, 24], np.uint32)[:, None] & 0xFF for i in range(3)
    )
    scales = np.concatenate([first & 63, third & 15 | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=1)
    return (d * scales).reshape(-1, words.shape[2]), -(dmin * minima).reshape(-1, words.shape[2])


def _bytes(words: np.ndarray, halves: np.ndarray) -> Scales:
    """Q6_K: 16 signed bytes."""
    scales = (words[:, :, None] >> np.array([0, 8, 16, 24], np.uint32)[:, None] & 0xFF).astype(np.uint8).view(np.int8)
    return (halves[:, None, None] * scales).reshape(-1, words.shape[2]), None


def _nibbles_of_six_bits(words: np.ndarray, halves: np.ndarray) -> Scales:
    """IQ4_XS: 8 scales of 6 bits, less 32, in nibbles and pairs of bits."""
    i = np.arange(8, dtype=np.uint32)[:, None]
    scales = (words[:, 1, None] >> 4 * i & 15 | (words[:, 0, None] >> 16 + 2 * i & 3) << 4).astype(np.float64) - 32
    return (_halves(words[:, 0])[0][:, None] * scales).reshape(-1, words.shape[2]), None


def _from(lowest: int, bits: int) -> tuple[int, ...]:
    return tuple(range(lowest, lowest + 2**bits))


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml's kvalues_iq4nl
_SIGNED_BYTES = (*range(128), *range(-128, 0))

FORMATS = {
    item.name: item
    for item in (
        GGUFFormat("q4_0", (Plane(4, 2, 16),), 32, _from(-8, 4), _single, half=0),
        GGUFFormat("q4_1", (Plane(4, 4, 16),), 32, _from(0, 4), _scale_and_minimum, (0, 2), (0,)),
        GGUFFormat("q5_0", (Plane(4, 6, 16), Plane(1, 2, 1)), 32, _from(-16, 5), _single, half=0),
        GGUFFormat("q5_1", (Plane(4, 8, 16), Plane(1, 4, 1)), 32, _from(0, 5), _scale_and_minimum, (0, 2), (0,)),
        GGUFFormat("q8_0", (Plane(8, 2, 32),), 32, _SIGNED_BYTES, _single, half=0),
        GGUFFormat("q4_k", (Plane(4, 16, 32),), 32, _from(0, 4), _six_bits, (0, 2), (0, 4, 8, 12)),
        GGUFFormat("q5_k", (Plane(4, 48, 32), Plane(1, 16, 32)), 32, _from(0, 5), _six_bits, (0, 2), (0, 4, 8, 12)),
        GGUFFormat(
            "q6_k", (Plane(4, 0, 64), Plane(2, 128, 32)), 16, _from(-32, 6), _bytes, (208,), (192, 196, 200, 204), 208
        ),
        GGUFFormat("iq4_nl", (Plane(4, 2, 16),), 32, IQ4, _single, half=0),
        GGUFFormat("iq4_xs", (Plane(4, 8, 16),), 32, IQ4, _nibbles_of_six_bits, (0,), (0, 4)),
    )
}


def random_blocks(
    item: GGUFFormat, out: int, size_in: int, rng: np.random.Generator, deviation: float = 1.0
) -> np.ndarray:
    """Rows of a random W [out, in], uint8 [out, bytes], with about this standard deviation."""
    blocks = rng.integers(0, 256, (out, size_in // item.block, item.block_bytes), np.uint8)
    of_scale = 1 if item.block == 32 else 74 if item.group == 16 else 37  # deviation of a scale in a block of blocks
    for offset in item.half_offsets:
        halves = deviation * (0.75 + 0.5 * rng.random((*blocks.shape[:2], 1))) / (np.std(item.levels) * of_scale)
        blocks[:, :, offset : offset + 2] = halves.astype(np.float16).view(np.uint8)
    return blocks.reshape(out, -1)
