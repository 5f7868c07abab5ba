"""Frozen matrices in f32, bf16 or f16, as checkpoints store them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import ml_dtypes
import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import ALIGNMENT, ITEM_BYTES, Storage, Tensor, persistent
from wgpu_lora.names.spelling import setting
from wgpu_lora.ops.embedding import TablePart, embedding_rows
from wgpu_lora.ops.half_precision import matmul_operand
from wgpu_lora.ops.linear.frozen_product import FrozenProduct
from wgpu_lora.ops.loss.sparse_logits import support_product
from wgpu_lora.ops.matmul.matmul import matmul_nn, matmul_nt
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import PIECE_BYTES, Loading, MatrixSource, Packed, Shared, Weight, read, write
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT

DTYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}  # safetensors' notation -> ours
NUMPY = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
MOST = {"f16": 65504.0, "bf16": 3.3895313892515355e38}


@dataclass(frozen=True)
class DenseWeight(Weight):
    """A matrix in parts of rows that fit one binding.

    dtype: f32, bf16 or f16, as stored. cap: of the logits, if it is an LM head whose logits are capped.
    """

    parts: tuple[Tensor, ...]
    dtype: str
    cap: float = 0.0
    out_features: int = field(init=False)
    in_features: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_features", sum(part.shape[0] for part in self.parts))
        object.__setattr__(self, "in_features", self.parts[0].shape[1])

    @property
    def format(self) -> str:
        return self.dtype

    @classmethod
    def declare(cls, shape: tuple[int, int], dtype: str, name: str, max_binding: int, cap: float = 0.0) -> DenseWeight:
        rows, cols = shape
        limit = max(1, max_binding // (cols * ITEM_BYTES[dtype]))
        if rows > limit:
            limit = limit // ALIGNMENT * ALIGNMENT or limit
        return cls(
            tuple(
                persistent((min(limit, rows - start), cols), dtype, "base", f"{name}[{start}:]")
                for start in range(0, rows, limit)
            ),
            dtype,
            cap,
        )

    def chunks(self, max_rows: int | None = None) -> Iterator[tuple[int, TablePart]]:
        """The chunks of `ops.embedding.EmbeddingTable`."""
        for first, rows in self.row_ranges(max_rows):
            kernels = matmul_nt, matmul_nn, embedding_rows, support_product
            yield first, TablePart(rows.shape[0], {"b": rows}, self.dtype, *kernels, {})

    def row_ranges(self, max_rows: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yields (first row, rows) pieces of at most max_rows rows, a multiple of 128 so that offsets are aligned."""
        first = 0
        for part in self.parts:
            step = max_rows or part.shape[0]
            for start in range(0, part.shape[0], step):
                stop = min(start + step, part.shape[0])
                yield first + start, part.rows(start, stop)
            first += part.shape[0]

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return self.parts if len(self.parts) == 1 else ()

    def with_operands(self, *operands: Tensor) -> DenseWeight:
        return DenseWeight(operands, self.dtype)

    def fused(self, weights: Sequence[DenseWeight], operands: Sequence[Tensor]) -> FrozenProduct:
        (b,), outs = operands, tuple(weight.out_features for weight in weights)
        return FrozenProduct(outs, self.in_features, matmul_nt, matmul_nn, lambda rec: {"b": b}, {"b_type": self.dtype})

    def forward(self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        a, scale, kind = matmul_operand(rec, x, self.in_features, keep=True)
        shape = {"m": x.size // self.in_features, "k": self.in_features, "a_type": kind, "b_type": self.dtype}
        for first, part in self.row_ranges():
            rows = part.shape[0]
            columns = {"y_skip": self.out_features - rows, "y_first": first}
            rec.dispatch(matmul_nt, a, part, y, bias, None, scale, n=rows, accumulate=accumulate, **columns, **shape)

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool) -> None:
        a, scale, kind = matmul_operand(rec, dy, self.out_features, keep=False)
        shape = {"m": dy.size // self.out_features, "n": self.in_features, "a_type": kind, "b_type": self.dtype}
        for first, part in self.row_ranges():
            rows, accumulate_part = part.shape[0], accumulate or first > 0
            columns = {"a_skip": self.out_features - rows, "a_first": first}
            rec.dispatch(
                matmul_nn, a, part, dx, None, None, scale, k=rows, accumulate=accumulate_part, **columns, **shape
            )

    def storages(self) -> list[Storage]:
        return [part.storage for part in self.parts]

    def load(self, loading: Loading, source: MatrixSource, name: str) -> None:
        row_bytes = self.in_features * ITEM_BYTES[self.dtype]
        step = max(1, PIECE_BYTES // row_bytes)
        step = step // 2 * 2 or 2  # an even number of rows is whole 32-bit words
        for first, part in self.row_ranges():
            for start in range(0, part.shape[0], step):
                stop = min(start + step, part.shape[0])
                rows = _rows_as(source, name, self.dtype, first + start, first + stop)
                write(loading.device, part, rows, start * row_bytes)

    def values(self, device: Device) -> np.ndarray:
        parts = (read(device, part).view(NUMPY[self.dtype]) for part in self.parts)
        return np.concatenate([part.astype(np.float32) for part in parts])

    def synthetic(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, np.ndarray]]:
        for part in self.parts:
            yield part, (0.02 * rng.standard_normal(part.shape, np.float32)).astype(NUMPY[self.dtype])


def _rows_as(source: MatrixSource, name: str, dtype: str, start: int, stop: int) -> np.ndarray:
    if DTYPES.get(source.dtype(name)) == dtype:
        return source.read_raw(name, start, stop)
    values = source.read_f32(name, start, stop)
    limit = MOST.get(dtype, np.inf)
    if limit < np.abs(values).max() < np.inf:  # models.loaded_model reports non-finite values
        raise UserError(
            f"{name} has values beyond {dtype}'s range of {limit:,.6g}: use {setting('base_dtype', DEFAULT_FORMAT)} "
            "or f32."
        )
    with np.errstate(over="ignore"):
        return values.astype(NUMPY[dtype])


@dataclass(frozen=True)
class Dense:
    """A base format of plain floats."""

    name: str
    packed_form: ClassVar[None] = None  # files store it as plain values

    @property
    def bits(self) -> float:
        return 8.0 * ITEM_BYTES[self.name]

    def declare(self, shape: tuple[int, int], name: str, shared: Shared, packed: Packed | None = None) -> DenseWeight:
        return DenseWeight.declare(shape, self.name, name, shared.max_binding)

    def round_trip(self, w: np.ndarray) -> np.ndarray:
        return w.astype(NUMPY[self.name]).astype(np.float32)


BF16, F16, F32 = Dense("bf16"), Dense("f16"), Dense("f32")
