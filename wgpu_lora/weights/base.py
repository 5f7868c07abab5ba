"""The interface of a base format: how frozen matrices are declared, loaded, multiplied and read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.tensor import ALIGNMENT, NUMPY, Storage, Tensor, persistent
from wgpu_lora.ops.embedding import EmbeddingTable
from wgpu_lora.ops.linear import FrozenMatrix

PIECE_BYTES = 32 << 20  # of a matrix, uploaded at a time


class StoredFormats(Protocol):
    """The part of a checkpoint that declaring its matrices uses."""

    def packed(self, name: str) -> Packed | None:
        """The matrix if it is stored in a base format that we write, or None."""

    def base_format(self, name: str) -> str | None:
        """The base format that keeps a tensor as it is stored; None if there is none."""


@runtime_checkable
class BlockSource(Protocol):
    """A checkpoint with tensors in the types of GGUF files."""

    def read_blocks(self, name: str, base_format: str, row_start: int, row_stop: int) -> np.ndarray:
        """Rows in this type, as they are stored: uint8 [rows, bytes]."""


class MatrixSource(StoredFormats, BlockSource, Protocol):
    """The part of a checkpoint that loading a matrix uses (see `formats.safetensors_checkpoint.Checkpoint`)."""

    def dtype(self, name: str) -> str:
        """The dtype of `read_raw`, in safetensors' notation."""

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray: ...

    def read_f32(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray: ...


@dataclass
class Shared:
    """Shared by the matrices of a model. max_binding: bytes. tables: lookup tables by name."""

    max_binding: int
    tables: dict[str, Tensor] = field(default_factory=dict)


class StoredMatrix(Protocol):
    """A frozen matrix W [out_features, in_features] on the device."""

    @property
    def format(self) -> str:
        """The name of its base format."""

    def storages(self) -> list[Storage]: ...

    def scratch(self) -> Mapping[str, int]:
        """Sizes, in f32 values, of the scratch tensors that `load` uses, by name; empty if it converts nothing."""

    def load(self, loading: Loading, source: MatrixSource, name: str) -> None:
        """Fills the allocated storages with the tensor `name`, read once from the first row to the last.

        Raises:
            UserError: the file is damaged, or a value is out of the format's range.
        """

    def values(self, device: Device) -> np.ndarray:
        """W decoded from the device, float32 [out, in]."""

    def packed(self, device: Device) -> Packed | None:
        """W read from the device in the form that files store; None for formats stored as plain values."""

    def synthetic(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Yields (tensor, random content), with W of standard deviation of about 0.02, for benchmarks."""


class Weight(StoredMatrix, FrozenMatrix, Protocol):
    """The matrix of a linear layer; see `ops.linear` for its products."""


class Table(StoredMatrix, EmbeddingTable, Protocol):
    """An embedding or LM head. dtype: of its values."""

    @property
    def dtype(self) -> str: ...

    @property
    def out_features(self) -> int: ...


@runtime_checkable
class Stacking(Weight, Protocol):
    """A weight that can be stored together with others, so that one dispatch multiplies all (see ops.matrix_stack)."""

    def stacked(self, siblings: Sequence[Weight], max_binding: int) -> Sequence[Weight] | None:
        """The declared matrices, its own first, in shared storages; None if they cannot be multiplied together."""

    def of_layer(self, siblings: Sequence[Weight]) -> Sequence[Weight]:
        """The declared matrices of a layer, its own first, after stacking; they may share what products prepare."""


def stacked(weights: Sequence[Weight], max_binding: int) -> Sequence[Weight]:
    """The declared matrices, which will be multiplied with the same inputs, stored together if their formats can."""
    first, *siblings = weights
    result = first.stacked(siblings, max_binding) if isinstance(first, Stacking) and siblings else None
    return result or weights


def of_layer(weights: Sequence[Weight]) -> Sequence[Weight]:
    """All declared matrices of a layer, which may be in several formats."""
    result = list(weights)
    for kind in dict.fromkeys(map(type, weights)):
        places = [place for place, weight in enumerate(weights) if type(weight) is kind]
        first, *siblings = (weights[place] for place in places)
        if isinstance(first, Stacking):
            for place, weight in zip(places, first.of_layer(siblings), strict=True):
                result[place] = weight
    return result


class BaseFormat(Protocol):
    """A way to store frozen matrices, registered in `weights.base_formats.BASE_FORMATS`."""

    @property
    def name(self) -> str:
        """The value of `--base-dtype`."""

    @property
    def bits(self) -> float:
        """Bits per weight of a large matrix on the device, including constants."""

    @property
    def packed_form(self) -> PackedForm | None:
        """How checkpoints store it; None if they cannot."""

    def declare(self, shape: tuple[int, int], name: str, shared: Shared, packed: Packed | None = None) -> Weight:
        """Declares a matrix [out, in] without allocating it.

        Args:
            packed: describes the stored matrix if the file has it in this format; its arrays are not read.
        """

    def round_trip(self, w: np.ndarray) -> np.ndarray:
        """The reference: w, float32 [out, in], quantised and dequantised in NumPy."""


class Loading:
    """A device and scratch tensors that matrices use in turn while they are loaded.

    A context manager; leaving it frees the scratch.

    importance: how much the inputs [in] of matrices count when they are quantised, by the matrices' names.
    """

    def __init__(
        self, device: Device, weights: Iterable[StoredMatrix], importance: Mapping[str, np.ndarray] | None = None
    ):
        self.device = device
        self.importance = importance or {}
        self.scratch = _scratch(weights)
        self._arena = Arena(device)
        allocate(device, {tensor.storage for tensor in self.scratch.values()})

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, *exception: object) -> None:
        release(self.device, {tensor.storage for tensor in self.scratch.values()})

    @contextmanager
    def run(self, program: Program) -> Iterator[None]:
        """Runs a program without temporaries, and releases it on leaving."""
        allocate(self.device, program.persistent_storages())
        program.build(self._arena)
        program.run()
        yield
        program.release()


def read(device: Device, tensor: Tensor) -> np.ndarray:
    """The values of a whole allocated tensor, in its shape."""
    values = device.read(tensor.storage.buffer, tensor.nbytes, tensor.byte_offset).view(NUMPY[tensor.dtype])
    return values.reshape(tensor.shape)


def write(device: Device, tensor: Tensor, values: np.ndarray, offset: int = 0) -> None:
    """Writes values to an allocated tensor, from `offset` bytes on."""
    device.write(tensor.storage.buffer, values, tensor.byte_offset + offset)


def scratch_bytes(weights: Iterable[StoredMatrix]) -> int:
    """Device memory in bytes that loading needs besides the matrices: scratch, and a program's dims."""
    result = _scratch(weights).values()
    return sum(tensor.storage.nbytes for tensor in result) + ALIGNMENT if result else 0


def _scratch(weights: Iterable[StoredMatrix]) -> dict[str, Tensor]:
    sizes: dict[str, int] = {}
    for weight in weights:
        for name, size in weight.scratch().items():
            sizes[name] = max(size, sizes.get(name, 0))
    return {name: persistent((size,), "f32", "workspace", name) for name, size in sizes.items()}


@dataclass(frozen=True)
class Packed:
    """A matrix [out, in] that a file stores in a base format; it is loaded without requantising.

    parts: names of its arrays, described in the format's module. read: returns the arrays in that order.
    """

    format: str
    shape: tuple[int, int]
    parts: tuple[str, ...]
    read: Callable[[], tuple[np.ndarray, ...]]


class StoredTensors(Protocol):
    """The tensors of a checkpoint as a packed form reads them (see `formats.packed_checkpoint.PackedCheckpoint`)."""

    @property
    def directory(self) -> Path: ...

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_dtype(self, name: str) -> str:
        """A tensor's dtype, in safetensors' notation."""

    def array(self, name: str, dtype: str) -> np.ndarray:
        """A tensor's values, flattened. Raises UserError unless it has this dtype, in safetensors' notation."""


class PackedForm(Protocol):
    """How checkpoints store the matrices of a base format: `BaseFormat.packed_form`."""

    @property
    def title(self) -> str:
        """Its name in messages."""

    def quantization_config(self, base_format: str, skip_modules: Sequence[str] = ()) -> Mapping[str, Any]:
        """The entry of config.json that is written for a model in this format.

        skip_modules: beginnings of the paths of modules that are not packed, besides the LM head.
        """

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of all tensors of a packed matrix except the one with the matrix's own name."""

    def base_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        """The base format that a config.json with this entry means; None if it means another form. Its values are
        untrusted and may have any type."""

    def is_packed(self, tensors: StoredTensors, name: str) -> bool:
        """Whether the tensors have the matrix of this name packed."""

    def check(self, tensors: StoredTensors, name: str, shape: tuple[int, ...], base_format: str) -> None:
        """Raises UserError unless the packed matrix is complete, has this shape and can be read.

        base_format: of the model, as config.json states it.
        """

    def read(self, tensors: StoredTensors, name: str, shape: tuple[int, ...]) -> Packed:
        """The packed matrix, checked before; its arrays are not read yet."""

    def decode(self, packed: Packed) -> np.ndarray:
        """W, float32 [out, in], of a packed matrix."""

    def tensors(self, name: str, packed: Packed, dtype: str) -> dict[str, np.ndarray]:
        """The tensors to write, by name. dtype: of the matrix before it was quantised, such as bfloat16."""
