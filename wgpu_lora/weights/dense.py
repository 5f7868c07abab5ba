"""Frozen matrices as checkpoints have them: f32, bf16 or f16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wgpu_lora.gpu.tensor import ALIGNMENT, ITEM_BYTES, Storage, Tensor, persistent
from wgpu_lora.ops.half import matmul_operand
from wgpu_lora.ops.matmul import matmul_nn, matmul_nt
from wgpu_lora.ops.recorder import Recorder


@dataclass(frozen=True)
class DenseWeight:
    """Rows in parts, each small enough to bind. dtype: f32, bf16 or f16, as stored."""

    parts: tuple[Tensor, ...]
    dtype: str

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
        """(first row, rows) pieces, none longer than max_rows (a multiple of 128, so that offsets can be bound)."""
        first = 0
        for part in self.parts:
            step = max_rows or part.shape[0]
            for start in range(0, part.shape[0], step):
                stop = min(start + step, part.shape[0])
                yield first + start, part.rows(start, stop)
            first += part.shape[0]

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
