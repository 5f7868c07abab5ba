"""Tensors are views of storage. A storage is a number of bytes, bound to a buffer when it is allocated or planned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

ITEM_BYTES = {"f32": 4, "u32": 4, "i32": 4, "bf16": 2, "f16": 2, "u8": 1}
NUMPY = {"f32": np.float32, "u32": np.uint32, "i32": np.int32, "bf16": np.uint16, "f16": np.float16, "u8": np.uint8}
ALIGNMENT = 256  # bytes, of a binding's offset, under WebGPU's default limits


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class Storage:
    """Bytes counted under `group`. Temporary storages have an `offset` in an arena's buffer, others a buffer each.

    on_host: temporary, in an arena in the host's memory.
    """

    nbytes: int
    group: str  # base | adapters | reference | optimizer | activations | workspace
    name: str
    temporary: bool = False
    buffer: Any = None
    offset: int = 0
    on_host: bool = False


@dataclass(frozen=True, eq=False)
class Tensor:
    """A row-major view of a storage. bf16, f16 and u8 are packed into 32-bit words."""

    shape: tuple[int, ...]
    dtype: str
    storage: Storage
    byte_offset: int = 0
    name: str = field(default="")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]

    def reshape(self, *shape: int) -> Tensor:
        assert math.prod(shape) == self.size, f"{self.name}: {self.shape} cannot become {shape}"
        return replace(self, shape=shape)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first dimension; their byte offset must be a multiple of ALIGNMENT."""
        step = self.nbytes // self.shape[0]
        assert start * step % ALIGNMENT == 0, f"{self.name}: the offset of row {start} is not aligned"
        return replace(self, shape=(stop - start, *self.shape[1:]), byte_offset=self.byte_offset + start * step)

    def binding(self) -> tuple[Any, int, int]:
        """(buffer, offset, size) in bytes, the size rounded up to whole words."""
        assert self.storage.buffer is not None, f"{self.name} has not been allocated"
        return self.storage.buffer, self.storage.offset + self.byte_offset, (self.nbytes + 3) & ~3


def persistent(shape: tuple[int, ...], dtype: str, group: str, name: str) -> Tensor:
    """A tensor with a buffer of its own, declared now and allocated later."""
    nbytes = (math.prod(shape) * ITEM_BYTES[dtype] + 3) & ~3
    return Tensor(shape, dtype, Storage(nbytes, group, name), name=name)


def share_storage(tensors: Sequence[Tensor], name: str) -> list[Tensor]:
    """Declared tensors as regions of one storage instead of their own, each at an aligned offset."""
    firsts = [0]
    for tensor in tensors:
        firsts.append(firsts[-1] + align(tensor.nbytes))
    storage = Storage(firsts[-1], tensors[0].storage.group, name)
    return [replace(t, storage=storage, byte_offset=first) for t, first in zip(tensors, firsts, strict=False)]


def spanning(parts: Sequence[Tensor]) -> Tensor | None:
    """All values from the first of these tensors to the end of the last, flat, with what lies between aligned offsets.

    One tensor alone is itself. None if they are not successive regions of one storage.
    """
    first, at = parts[0], parts[0].byte_offset
    if len(parts) == 1:
        return first
    for part in parts:
        if (part.storage, part.byte_offset, part.dtype) != (first.storage, at, first.dtype):
            return None
        at += align(part.nbytes)
    size = (min(at, first.storage.nbytes) - first.byte_offset) // ITEM_BYTES[first.dtype]
    return replace(first, shape=(size,))
