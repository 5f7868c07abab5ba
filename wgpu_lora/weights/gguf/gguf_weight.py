"""Frozen matrices and tables in the types of GGUF files, packed on the device from the file's blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.errors import NotFiniteError, UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import ALIGNMENT, Storage, Tensor, persistent
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.ops.embedding import TablePart
from wgpu_lora.ops.linear.frozen_product import FrozenProduct
from wgpu_lora.weights.base import PIECE_BYTES, Loading, MatrixSource, Packed, Shared, StoredMatrix, Weight, read
from wgpu_lora.weights.base_formats import GGUF
from wgpu_lora.weights.gguf.gguf_formats import FORMATS, GGUFFormat, random_blocks
from wgpu_lora.weights.gguf.gguf_products import (
    gguf_matmul,
    gguf_matmul_backward,
    gguf_pack,
    gguf_rows,
    gguf_support_product,
)


@dataclass(frozen=True)
class GGUFWeight(Weight):
    """Codes and scales of a matrix, as in `gguf_formats`. Forward and backward read the same codes."""

    out_features: int
    in_features: int
    item: GGUFFormat
    codes: Tensor
    scales: Tensor

    @classmethod
    def declare(cls, shape: tuple[int, int], item: GGUFFormat, name: str) -> GGUFWeight:
        out, size_in = shape
        if size_in % item.block:
            raise UserError(
                f"{setting('base_dtype', item.name)} has blocks of {item.block} values, which do not divide the "
                f"{size_in:,} columns of {name}: use another type."
            )
        codes = persistent((item.code_rows(size_in), out), "u32", "base", f"{name}.codes")
        scales = persistent((item.scale_rows(size_in), out), "u32", "base", f"{name}.scales")
        return cls(out, size_in, item, codes, scales)

    @property
    def format(self) -> str:
        return self.item.name

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "scales": self.scales}

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return self.codes, self.scales

    def with_operands(self, *operands: Tensor) -> GGUFWeight:
        codes, scales = operands
        return replace(self, codes=codes, scales=scales)

    def fused(self, weights: Sequence[GGUFWeight], operands: Sequence[Tensor]) -> FrozenProduct:
        tensors, outs = dict(zip(self.tensors, operands, strict=True)), tuple(weight.out_features for weight in weights)
        kernels = gguf_matmul, gguf_matmul_backward
        return FrozenProduct(outs, self.in_features, *kernels, lambda rec: tensors, {"b_type": self.format})

    def storages(self) -> list[Storage]:
        return [self.codes.storage, self.scales.storage]

    # -- contents --------------------------------------------------------------------------------------------------

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        return self.in_features // self.item.block * self.item.block_bytes

    def scratch(self) -> Mapping[str, int]:
        return {"staging": -(-min(self.piece_rows, self.out_features) * self.row_bytes // 4)}

    @property
    def piece_rows(self) -> int:
        """Rows that are uploaded at a time."""
        return max(4, PIECE_BYTES // self.row_bytes // 4 * 4)

    def load(self, loading: Loading, source: MatrixSource, name: str) -> None:
        self.load_rows(loading, source, name, 0)

    def load_rows(self, loading: Loading, source: MatrixSource, name: str, first_row: int) -> None:
        """Fills the matrix with the rows from first_row on of a larger one."""
        for first in range(0, self.out_features, self.piece_rows):
            rows = min(self.piece_rows, self.out_features - first)
            blocks = source.read_blocks(name, self.format, first_row + first, first_row + first + rows)
            if not self.item.finite(blocks):
                raise NotFiniteError(
                    f"{name} has scales that are NaN or infinite: download or convert the model again."
                )
            staging = loading.scratch["staging"]
            padding = -blocks.size % 4  # of a word
            flat = np.pad(blocks.reshape(-1), (0, padding)) if padding else blocks
            loading.device.write(staging.storage.buffer, flat)
            program = Program(loading.device, "pack")
            words = replace(staging, shape=(flat.size // 4,), dtype="u32")
            shape: dict[str, Any] = {"rows": rows, "out": self.out_features, "size_in": self.in_features}
            program.dispatch(gguf_pack, words, self.codes, self.scales, first=first, b_type=self.format, **shape)
            with loading.run(program):
                pass

    def values(self, device: Device) -> np.ndarray:
        codes, scales = read(device, self.codes), read(device, self.scales)
        return self.item.decode(codes, scales, self.out_features, self.in_features).astype(np.float32)

    def synthetic(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, np.ndarray]]:
        blocks = random_blocks(self.item, self.out_features, self.in_features, rng, 0.02)
        return zip((self.codes, self.scales), self.item.to_words(blocks), strict=True)


@dataclass(frozen=True)
class GGUFTable(StoredMatrix):
    """An embedding or LM head in matrices of rows that fit one binding.

    cap: of the logits, if it is an LM head whose logits are capped.
    """

    parts: tuple[GGUFWeight, ...]
    cap: float = 0.0
    dtype: ClassVar[str] = "f32"  # of its values

    @classmethod
    def declare(
        cls, shape: tuple[int, int], base_format: str, name: str, max_binding: int, cap: float = 0.0
    ) -> GGUFTable:
        (rows, cols), item = shape, FORMATS[base_format]
        limit = max(ALIGNMENT, max_binding // (4 * item.code_rows(cols)) // ALIGNMENT * ALIGNMENT)
        starts = range(0, rows, limit)
        return cls(tuple(GGUFWeight.declare((min(limit, rows - i), cols), item, f"{name}[{i}:]") for i in starts), cap)

    @property
    def format(self) -> str:
        return self.parts[0].format

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    def chunks(self, max_rows: int | None = None) -> Iterator[tuple[int, TablePart]]:
        """The chunks of `ops.embedding.EmbeddingTable`."""
        first, kernels = 0, (gguf_matmul, gguf_matmul_backward, gguf_rows, gguf_support_product)
        for part in self.parts:
            count = part.out_features
            step = max_rows or count
            for start in range(0, count, step):
                rows = min(step, count - start)
                constants = {"w_skip": count - rows, "w_first": start}
                yield first + start, TablePart(rows, part.tensors, self.format, *kernels, constants)
            first += count

    def storages(self) -> list[Storage]:
        return [storage for part in self.parts for storage in part.storages()]

    def scratch(self) -> Mapping[str, int]:
        return self.parts[0].scratch()

    def load(self, loading: Loading, source: MatrixSource, name: str) -> None:
        first = 0
        for part in self.parts:
            part.load_rows(loading, source, name, first)
            first += part.out_features

    def values(self, device: Device) -> np.ndarray:
        return np.concatenate([part.values(device) for part in self.parts])

    def synthetic(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, np.ndarray]]:
        for part in self.parts:
            yield from part.synthetic(rng)


@dataclass(frozen=True)
class GGUFType:
    """The base format of a type."""

    item: GGUFFormat
    packed_form: ClassVar[None] = None  # only GGUF files have it

    @property
    def name(self) -> str:
        return self.item.name

    @property
    def bits(self) -> float:
        return self.item.bits

    def declare(self, shape: tuple[int, int], name: str, shared: Shared, packed: Packed | None = None) -> GGUFWeight:
        return GGUFWeight.declare(shape, self.item, name)

    def round_trip(self, w: np.ndarray) -> np.ndarray:
        return w  # values of a file, which are exact


def gguf_type(name: str) -> GGUFType:
    """The base format of a type, by its name in lower case."""
    return GGUFType(FORMATS[name])


@dataclass(frozen=True)
class GGUFFile:
    """The matrices of a GGUF file, each in its own type. bits: of the largest type that is quantised."""

    name: ClassVar[str] = GGUF
    packed_form: ClassVar[None] = None
    bits: ClassVar[float] = FORMATS["q8_0"].bits

    def declare(self, shape: tuple[int, int], name: str, shared: Shared, packed: Packed | None = None) -> Weight:
        raise UserError(
            f"{setting('base_dtype', GGUF)} is for GGUF files: give one as {flag('model')}, or a single type such as "
            "q8_0 for a shape."
        )

    def round_trip(self, w: np.ndarray) -> np.ndarray:
        return w  # values of a file, which are exact


GGUF_FILE = GGUFFile()
