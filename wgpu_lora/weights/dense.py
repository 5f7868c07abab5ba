"""Frozen matrices in f32, bf16 or f16, as checkpoints store them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import ALIGNMENT, ITEM_BYTES, Storage, Tensor, persistent
from wgpu_lora.names.naming import setting
from wgpu_lora.ops.half import matmul_operand
from wgpu_lora.ops.linear import LowRank
from wgpu_lora.ops.matmul import matmul_nn, matmul_nt
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import PIECE_BYTES, Loading, MatrixSource, Shared
from wgpu_lora.weights.packed import Packed
from wgpu_lora.weights.registry import DEFAULT_FORMAT

DTYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}  # safetensors' notation -> ours
NUMPY = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
MOST = {"f16": 65504.0, "bf16": 3.3895313892515355e38}


@dataclass(frozen=True)
class DenseWeight:
    """A matrix in parts of rows that fit one binding. dtype: f32, bf16 or f16, as stored."""

    parts: tuple[Tensor, ...]
    dtype: str

    @property
    def format(self) -> str:
        return self.dtype

    @property
    def out_features(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].shape[1]

    @classmethod
    def declare(cls, shape: tuple[int, int], dtype: str, name: str, max_binding: int) -> DenseWeight:
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
        )

    def chunks(self, max_rows: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yields (first row, rows) pieces of at most max_rows rows, a multiple of 128 so that offsets are aligned."""
        first = 0
        for part in self.parts:
            step = max_rows or part.shape[0]
            for start in range(0, part.shape[0], step):
                stop = min(start + step, part.shape[0])
                yield first + start, part.rows(start, stop)
            first += part.shape[0]

    def product(self) -> DenseProduct | None:
        return DenseProduct(self) if len(self.parts) == 1 else None

    def forward(self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        a, scale, kind = matmul_operand(rec, x, self.in_features, keep=True)
        shape = {"m": x.size // self.in_features, "k": self.in_features, "a_type": kind, "b_type": self.dtype}
        for first, part in self.chunks():
            rows = part.shape[0]
            columns = {"y_skip": self.out_features - rows, "y_first": first}
            rec.dispatch(matmul_nt, a, part, y, bias, None, scale, n=rows, accumulate=accumulate, **columns, **shape)

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool) -> None:
        a, scale, kind = matmul_operand(rec, dy, self.out_features, keep=False)
        shape = {"m": dy.size // self.out_features, "n": self.in_features, "a_type": kind, "b_type": self.dtype}
        for first, part in self.chunks():
            rows, more = part.shape[0], accumulate or first > 0
            columns = {"a_skip": self.out_features - rows, "a_first": first}
            rec.dispatch(matmul_nn, a, part, dx, None, None, scale, k=rows, accumulate=more, **columns, **shape)

    def storages(self) -> list[Storage]:
        return [part.storage for part in self.parts]

    def scratch(self) -> Mapping[str, int]:
        return {}

    def load(self, loading: Loading, source: MatrixSource, name: str) -> None:
        row_bytes = self.in_features * ITEM_BYTES[self.dtype]
        step = max(1, PIECE_BYTES // row_bytes)
        step = step // 2 * 2 or 2  # an even number of rows is whole 32-bit words
        for first, part in self.chunks():
            for start in range(0, part.shape[0], step):
                stop = min(start + step, part.shape[0])
                rows = _rows_as(source, name, self.dtype, first + start, first + stop)
                loading.device.write(part.storage.buffer, rows, start * row_bytes)

    def values(self, device: Device) -> np.ndarray:
        parts = (device.read(p.storage.buffer)[: p.nbytes].view(NUMPY[self.dtype]).reshape(p.shape) for p in self.parts)
        return np.concatenate([part.astype(np.float32) for part in parts])

    def packed(self, device: Device) -> Packed | None:
        return None

    def synthetic(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, np.ndarray]]:
        for part in self.parts:
            yield part, (0.02 * rng.standard_normal(part.shape, np.float32)).astype(NUMPY[self.dtype])


@dataclass(frozen=True)
class DenseProduct:
    """The product with a dense matrix of one part, and what LoRA adds."""

    weight: DenseWeight

    def adds(self, rec: Recorder, bias: bool) -> bool:
        return True

    def forward(
        self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool, low: LowRank | None
    ) -> None:
        (part,) = self.weight.parts
        out, size_in = part.shape
        a, scale, kind = matmul_operand(rec, x, size_in, keep=True)
        shape = {"m": x.size // size_in, "n": out, "k": size_in, "a_type": kind, "b_type": self.weight.dtype}
        added = (low.tensors, low.constants) if low else ((), {})
        rec.dispatch(matmul_nt, a, part, y, bias, None, scale, *added[0], accumulate=accumulate, **shape, **added[1])

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool, low: LowRank | None) -> None:
        (part,) = self.weight.parts
        out, size_in = part.shape
        a, scale, kind = matmul_operand(rec, dy, out, keep=False)
        shape = {"m": dy.size // out, "n": size_in, "k": out, "a_type": kind, "b_type": self.weight.dtype}
        added = (low.tensors, low.constants) if low else ((), {})
        rec.dispatch(matmul_nn, a, part, dx, None, None, scale, *added[0], accumulate=accumulate, **shape, **added[1])


def _rows_as(source: MatrixSource, name: str, dtype: str, start: int, stop: int) -> np.ndarray:
    if DTYPES.get(source.dtype(name)) == dtype:
        return source.read_raw(name, start, stop)
    values = source.read_f32(name, start, stop)
    most = MOST.get(dtype, np.inf)
    if most < np.abs(values).max() < np.inf:  # models.audit reports non-finite values
        raise UserError(
            f"{name} has values beyond {dtype}'s range of {most:,.6g}: use {setting('base_dtype', DEFAULT_FORMAT)} "
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
