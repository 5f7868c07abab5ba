"""Computes the SHA-256 of weights and checks that every value is finite, while they are loaded."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from wgpu_lora.errors import NotFiniteError
from wgpu_lora.formats.checkpoint import WeightSource
from wgpu_lora.weights.packed import Packed

LARGEST = {"BF16": 0x7F7F, "F16": 0x7BFF, "F32": 0x7F7FFFFF}  # bits of the largest finite magnitude
FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # NumPy's names -> safetensors' notation
AHEAD = 1  # pieces that may wait to be checked
CHUNK = 1 << 18  # values checked at a time, so that they stay in the processor's cache


class AuditedSource:
    """A checkpoint whose reads are hashed and checked in a separate thread, in parallel to the device's work.

    Packing would hide a NaN, and a change in the middle of a shard does not show in its header, so every value is
    checked. Each tensor must be read once, from the first row to the last.

    A context manager; leaving it waits for the thread.
    """

    def __init__(self, source: WeightSource):
        self._source = source
        self._hashes: dict[str, hashlib._Hash] = {}
        self._pool = ThreadPoolExecutor(1, "weights")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> AuditedSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def digest(self) -> str:
        """SHA-256 (hex) over the names and values of all tensors read.

        Raises:
            NotFiniteError: a value is NaN or infinite.
        """
        self._settle(0)
        lines = (f"{name} {sha.hexdigest()}\n" for name, sha in sorted(self._hashes.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    # -- WeightSource ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return self._source.names()

    def dtype(self, name: str) -> str:
        return self._source.dtype(name)

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        return self._look(name, self._source.read_raw(name, row_start, row_stop), self._source.dtype(name))

    def read_f32(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        return self._look(name, self._source.read_f32(name, row_start, row_stop), "F32")

    def packed(self, name: str) -> Packed | None:
        found = self._source.packed(name)
        return found and replace(found, read=lambda: self._look_at_parts(name, found))

    def _look_at_parts(self, name: str, packed: Packed) -> tuple[np.ndarray, ...]:
        return tuple(self._look(name, part, FLOATS.get(part.dtype.name)) for part in packed.read())

    # -- the thread --------------------------------------------------------------------------------------------------

    def _look(self, name: str, values: np.ndarray, dtype: str | None) -> np.ndarray:
        """Returns `values` and queues their check, waiting until at most AHEAD others are pending."""
        self._settle(AHEAD)
        sha = self._hashes.setdefault(name, hashlib.sha256())
        self._waiting.append(self._pool.submit(_examine, name, sha, np.ascontiguousarray(values), dtype))
        return values

    def _settle(self, left: int) -> None:
        while len(self._waiting) > left:
            self._waiting.popleft().result()


def _examine(name: str, sha: hashlib._Hash, values: np.ndarray, dtype: str | None) -> None:
    sha.update(values.reshape(-1).view(np.uint8).data)
    if dtype is None or not values.size:
        return
    bits = values.reshape(-1).view(np.uint32 if dtype == "F32" else np.uint16)
    magnitude = 0x7FFFFFFF if dtype == "F32" else 0x7FFF
    for first in range(0, bits.size, CHUNK):
        # Without the sign, a float's bits are ordered like its magnitude, with infinity and NaN last.
        if np.bitwise_and(bits[first : first + CHUNK], magnitude).max() > LARGEST[dtype]:
            raise NotFiniteError(f"{name} holds values that are NaN or infinite: download or convert the model again.")
