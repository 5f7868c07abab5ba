"""Frozen weight matrices on the device, dense or NF4: each knows how to record its own products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from wgpu_lora.gpu.kernel import U32, Fixed, Out, kernel, one_per
from wgpu_lora.gpu.tensor import ALIGNMENT, ITEM_BYTES, Storage, Tensor, persistent
from wgpu_lora.ops.half import matmul_operand
from wgpu_lora.ops.matmul import matmul_nn, matmul_nt, nf4_matmul, nf4_matmul_backward
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.quant.nf4 import BLOCK, NESTED_BLOCK


class Weight(Protocol):
    """W [out_features, in_features], frozen."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    def forward(self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        """y (+)= x W^T (+ bias)."""

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool) -> None:
        """dx (+)= dy W."""

    def storages(self) -> list[Storage]: ...


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


@kernel("nf4_scales.wgsl", grid=lambda c: one_per(c.blocks), lib=("linear",))
def nf4_scales(absmax_codes: Fixed, nested: Fixed, dynamic: Fixed, scales: Out, *, blocks: U32) -> Any:
    """scales[b] = dynamic[absmax_codes[b]] * nested[b / 256] + offset, with the offset as nested's last entry."""
    codes = absmax_codes.reshape(-1)[:blocks].astype(int)
    return dynamic[codes] * np.repeat(nested[:-1], NESTED_BLOCK)[:blocks] + nested[-1]


@dataclass(frozen=True)
class NF4Weight:
    """4-bit codes with double-quantised constants; forward and backward read the same codes.

    codes u32 [ceil(in / 8), out]: word (k8, n) packs W[n, 8 k8 .. 8 k8 + 7], lowest nibble first.
    constants: absmax_codes u8 [blocks], nested f32 [ceil(blocks / 256) + 1], the last entry the offset, and dynamic
    f32 [256]; or absmax f32 [blocks] alone, of a checkpoint that has them so.
    """

    out_features: int
    in_features: int
    codes: Tensor
    constants: tuple[Tensor, ...]

    @classmethod
    def declare(cls, shape: tuple[int, int], name: str, dynamic: Tensor, nested: bool = True) -> NF4Weight:
        out, size_in = shape
        blocks = -(-out * size_in // BLOCK)
        codes = persistent((-(-size_in // 8), out), "u32", "base", f"{name}.codes")
        if not nested:
            return cls(out, size_in, codes, (persistent((blocks,), "f32", "base", f"{name}.absmax"),))
        absmax_codes = persistent((blocks,), "u8", "base", f"{name}.absmax_codes")
        more = persistent((-(-blocks // NESTED_BLOCK) + 1,), "f32", "base", f"{name}.nested")
        return cls(out, size_in, codes, (absmax_codes, more, dynamic))

    def _scales(self, rec: Recorder) -> Tensor:
        # Decoded into scratch before each product, so that the matmul reads one f32 a block and nothing stays; or kept.
        blocks, source = self.constants[0].size, self.constants[0].storage
        if len(self.constants) == 1:
            return self.constants[0]
        if rec.kept is None:
            scales = rec.temp((blocks,), name="scales")
            rec.dispatch(nf4_scales, *self.constants, scales, blocks=blocks)
            return scales
        if source not in rec.kept.tensors:
            rec.kept.tensors[source] = persistent((blocks,), "f32", "workspace", "scales")
            rec.kept.program.dispatch(nf4_scales, *self.constants, rec.kept.tensors[source], blocks=blocks)
        return rec.kept.tensors[source]

    def forward(self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        a, scale, kind = matmul_operand(rec, x, self.in_features, keep=True)
        shape = {"m": x.size // self.in_features, "n": self.out_features, "k": self.in_features, "a_type": kind}
        rec.dispatch(nf4_matmul, a, self.codes, self._scales(rec), y, bias, scale, accumulate=accumulate, **shape)

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool) -> None:
        a, scale, kind = matmul_operand(rec, dy, self.out_features, keep=False)
        shape = {"m": dy.size // self.out_features, "n": self.in_features, "k": self.out_features, "a_type": kind}
        codes, constants = self.codes, self._scales(rec)
        rec.dispatch(nf4_matmul_backward, a, codes, constants, dx, scale, accumulate=accumulate, **shape)

    def storages(self) -> list[Storage]:
        return [t.storage for t in (self.codes, *self.constants)]
