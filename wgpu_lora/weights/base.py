"""What a base format is: how frozen matrices are declared, loaded, multiplied and read back, whatever their bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.tensor import ALIGNMENT, Storage, Tensor, persistent
from wgpu_lora.ops.linear import FrozenMatrix

PIECE_BYTES = 32 << 20  # of a matrix on its way to the device


@dataclass(frozen=True)
class Packed:
    """A matrix [out, in] as a file stores it in a base format, which its values are not computed from again.

    parts: names of its arrays, which the format's module describes. read: the arrays, whole and in that order.
    """

    format: str
    shape: tuple[int, int]
    parts: tuple[str, ...]
    read: Callable[[], tuple[np.ndarray, ...]]


class MatrixSource(Protocol):
    """What loading a matrix asks of a checkpoint (see `formats.checkpoint.Checkpoint`)."""

    def dtype(self, name: str) -> str:
        """What `read_raw` gives, as safetensors calls it."""

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray: ...

    def read_f32(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray: ...

    def packed(self, name: str) -> Packed | None:
        """The matrix where it is stored in a base format; None where its values are."""


@dataclass
class Shared:
    """What the matrices of one model share: the bytes that one binding may hold, and tables by name."""

    max_binding: int
    tables: dict[str, Tensor] = field(default_factory=dict)


class Weight(FrozenMatrix, Protocol):
    """A frozen matrix W [out_features, in_features] on the device; see ops.linear for its products."""

    @property
    def format(self) -> str:
        """The name of its base format."""

    def storages(self) -> list[Storage]: ...

    def scratch(self) -> Mapping[str, int]:
        """f32 values of each scratch tensor that `load` uses, by name; empty where what is stored goes up as it is."""

    def load(self, loading: Loading, source: MatrixSource, name: str) -> None:
        """Fills its allocated storages with a checkpoint's tensor, from its first row to its last.

        Raises:
            UserError: the file is damaged, or a value is beyond what the format holds.
        """

    def values(self, device: Device) -> np.ndarray:
        """W as it is on the device, decoded: float32 [out, in]."""

    def packed(self, device: Device) -> Packed | None:
        """W as it is on the device, as a file stores it; None of a format whose values are stored."""

    def synthetic(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Its tensors with random contents as they are stored, W of a deviation of about 0.02; for measuring."""


class BaseFormat(Protocol):
    """One way to keep frozen matrices; `registry.BASE_FORMATS` lists them."""

    @property
    def name(self) -> str:
        """What --base-dtype calls it."""

    @property
    def bits(self) -> float:
        """Of a weight of a large matrix on the device, constants included."""

    def declare(self, shape: tuple[int, int], name: str, shared: Shared, packed: Packed | None = None) -> Weight:
        """A matrix [out, in] with nothing allocated.

        Args:
            packed: what a file stores, where that is in this format already; only what it is, its arrays are not read.
        """

    def round_trip(self, w: np.ndarray) -> np.ndarray:
        """The reference: what the format makes of float32 [out, in], in NumPy."""


class Loading:
    """The device that matrices are loaded onto, and scratch there that they use one after another.

    A context manager, which frees the scratch.
    """

    def __init__(self, device: Device, weights: Iterable[Weight]):
        self.device = device
        self.scratch = _scratch(weights)
        self._arena = Arena(device)
        allocate(device, {tensor.storage for tensor in self.scratch.values()})

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, *exception: object) -> None:
        release(self.device, {tensor.storage for tensor in self.scratch.values()})

    @contextmanager
    def running(self, program: Program) -> Iterator[None]:
        """Runs a program that has no temporaries; it is released on leaving."""
        allocate(self.device, program.persistent_storages())
        program.build(self._arena)
        program.run()
        yield
        program.release()


def scratch_bytes(weights: Iterable[Weight]) -> int:
    """Bytes of the device that loading holds beside the matrices: scratch, and a program's dims."""
    found = _scratch(weights).values()
    return sum(tensor.storage.nbytes for tensor in found) + ALIGNMENT if found else 0


def _scratch(weights: Iterable[Weight]) -> dict[str, Tensor]:
    sizes: dict[str, int] = {}
    for weight in weights:
        for name, size in weight.scratch().items():
            sizes[name] = max(size, sizes.get(name, 0))
    return {name: persistent((size,), "f32", "workspace", name) for name, size in sizes.items()}
