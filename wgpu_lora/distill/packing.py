"""Token ids in as few bits as the vocabulary needs: 18 instead of 32 for 151,936 tokens."""

from __future__ import annotations

import numpy as np

MOST_BITS = 25  # an id and the up to 7 bits before it are within 32 bits
_SLACK = 3  # bytes behind a row that a read of 32 bits may touch


def id_bits(vocab_size: int) -> int:
    """Bits of an id of a vocabulary."""
    return max(1, int(vocab_size - 1).bit_length())


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a row of `count` ids."""
    return -(-count * bits // 8)


def pack_ids(ids: np.ndarray, bits: int) -> np.ndarray:
    """Ids u32 [n, S] as u8 [n, ceil(S bits / 8)]: id s begins at bit s * bits, the lowest bit first."""
    rows, count = ids.shape
    single = (ids[:, :, None] >> np.arange(bits, dtype=np.uint32) & 1).astype(np.uint8)
    return np.packbits(single.reshape(rows, count * bits), axis=1, bitorder="little")


def unpack_ids(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    """The ids u32 [n, count] of what `pack_ids` gave."""
    assert bits <= MOST_BITS
    begin = np.arange(count) * bits
    spare = np.pad(packed, ((0, 0), (0, _SLACK))).astype(np.uint32)
    words = np.zeros((len(packed), count), np.uint32)
    for byte in range(4):
        words |= spare[:, begin // 8 + byte] << np.uint32(8 * byte)
    return words >> (begin % 8).astype(np.uint32) & np.uint32((1 << bits) - 1)
