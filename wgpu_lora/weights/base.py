"""The interface of a base format: how frozen matrices are declared, loaded, multiplied and read back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.tensor import ALIGNMENT, NUMPY, Storage, Tensor, align, persistent, share_storage, spanning
from wgpu_lora.ops.embedding import EmbeddingTable
from wgpu_lora.ops.linear.frozen_product import FrozenMatrix, FrozenProduct
from wgpu_lora.ops.linear.trained_matrix import TrainedMatrix

PIECE_BYTES = 32 << 20  # of a matrix, uploaded at a time


class StoredFormats(Protocol):
    """The part of a checkpoint that declaring its matrices uses."""

    def packed(self, name: str) -> Packed | None:
        """The matrix if it is stored in a base format that we write, or None."""
        return None

    def base_format(self, name: str) -> str | None:
        """The base format that keeps a tensor as it is stored; None if there is none."""
        return None


class MatrixSource(StoredFormats, Protocol):
    """The part of a checkpoint that loading a matrix uses."""

    def read_blocks(self, name: str, base_format: str, row_start: int, row_stop: int) -> np.ndarray:
        """Rows in this type of GGUF files, as they are stored: uint8 [rows, bytes]."""
        raise ValueError(f"{name} is not in a GGUF file")

    def dtype(self, name: str) -> str:
        """The dtype of `read_raw`, in safetensors' notation."""

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray: ...

    def read_f32(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray: ...


class WeightSource(MatrixSource, Protocol):
    """The part of a checkpoint that loading a model uses (see `formats.safetensors_checkpoint.Checkpoint`)."""

    def names(self) -> list[str]: ...

    def digest(self) -> str: ...


@dataclass
class Shared:
    """Shared by the matrices of a model. max_binding: bytes. tables: lookup tables by name."""

    max_binding: int
    tables: dict[str, Tensor] = field(default_factory=dict)


class StoredMatrix(Protocol):
    """A frozen matrix W [out_features, in_features] on the device."""

    @property
    @abstractmethod
    def format(self) -> str:
        """The name of its base format."""

    @abstractmethod
    def storages(self) -> list[Storage]: ...

    def scratch(self) -> Mapping[str, int]:
        """Sizes, in f32 values, of the scratch tensors that `load` uses, by name; empty if it converts nothing."""
        return {}

    @abstractmethod
    def load(self, loading: Loading, source: MatrixSource, name: str) -> None:
        """Fills the allocated storages with the tensor `name`, read once from the first row to the last.

        Raises:
            UserError: the file is damaged, or a value is out of the format's range.
        """

    @abstractmethod
    def values(self, device: Device) -> np.ndarray:
        """W decoded from the device, float32 [out, in]."""

    def packed(self, device: Device) -> Packed | None:
        """W read from the device in the form that files store; None for formats stored as plain values."""
        return None

    @property
    def trainable(self) -> ConstantWeight | None:
        """This matrix, if it has constants that can be trained."""
        return None

    @abstractmethod
    def synthetic(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Yields (tensor, random content), with W of standard deviation of about 0.02, for benchmarks."""


class Weight(StoredMatrix, FrozenMatrix):
    """The matrix of a linear layer.

    A format whose matrices can be stored together, so that one dispatch multiplies all of them (see
    `ops.matmul.matrix_stack`), has `operands`, `with_operands` and `fused`.
    """

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """What products read of it, to be stored with that of others; () if it is not."""
        return ()

    def with_operands(self, *operands: Tensor) -> Weight:
        """The matrix with its operands elsewhere."""
        raise NotImplementedError

    def fused(self, weights: Sequence[Self], operands: Sequence[Tensor]) -> FrozenProduct | None:
        """The product with matrices whose operands are regions of these; None if it takes several dispatches."""
        raise NotImplementedError

    def _with(self, siblings: Sequence[FrozenMatrix]) -> list[Self]:
        """This matrix and others, if all have operands of the same format; else none."""
        kind = self.format, [operand.dtype for operand in self.operands]
        matches = [other for other in siblings if isinstance(other, type(self))]
        alike = all((other.format, [operand.dtype for operand in other.operands]) == kind for other in matches)
        return [self, *matches] if self.operands and alike and len(matches) == len(siblings) else []

    def stacked(self, siblings: Sequence[Weight], max_binding: int) -> Sequence[Weight]:
        """The declared matrices, its own first, in shared storages if they can be multiplied together."""
        weights = self._with(siblings)
        columns = list(zip(*(weight.operands for weight in weights), strict=True))
        if not columns or any(sum(align(tensor.nbytes) for tensor in column) > max_binding for column in columns):
            return [self, *siblings]
        shared = [share_storage(column, f"{column[0].name} and others") for column in columns]
        return [weight.with_operands(*own) for weight, *own in zip(weights, *shared, strict=True)]

    def product(self, siblings: Sequence[FrozenMatrix]) -> FrozenProduct | None:
        weights = self._with(siblings)
        operands = [spanning(tensors) for tensors in zip(*(weight.operands for weight in weights), strict=True)]
        whole = [operand for operand in operands if operand]
        return self.fused(weights, whole) if whole and len(whole) == len(operands) else None

    @classmethod
    def of_layer(cls, weights: Sequence[Weight]) -> Sequence[Weight]:
        """The declared matrices of a layer after stacking; those of this class may share what products prepare."""
        return weights


class ConstantWeight(Weight):
    """A weight W made of codes and constants, which may be trained. All of its constants are matrices."""

    @property
    def trainable(self) -> ConstantWeight:
        return self

    @abstractmethod
    def constant_shapes(self) -> Mapping[str, tuple[int, int]]:
        """The shapes of the constants by name, such as 'table' [out, 2^bits] and 'scales' [groups, out]."""

    @abstractmethod
    def read_constants(self, device: Device) -> dict[str, np.ndarray]:
        """The constants of the loaded weight, f32, by name."""

    @abstractmethod
    def with_constants(
        self, constants: Mapping[str, Tensor], grads: Mapping[str, Tensor], ranges: Tensor
    ) -> TrainedMatrix:
        """The matrix of the same codes with these constants, f32. grads, ranges: see `TrainedMatrix`."""

    @abstractmethod
    def packed_with(self, device: Device, constants: Mapping[str, np.ndarray], dtype: str) -> Packed:
        """The codes with these constants, as files store them. dtype: of the constants, f32 or f16."""


class Table(StoredMatrix, EmbeddingTable, Protocol):
    """An embedding or LM head. dtype: of its values."""

    @property
    def dtype(self) -> str: ...

    @property
    def out_features(self) -> int: ...


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
    """The tensors of a checkpoint as a packed form reads them (see `PackedCheckpoint`)."""

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
