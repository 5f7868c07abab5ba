"""NF4: 4-bit codes and double-quantised constants of blocks of 64, packed on the device (Dettmers et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import U32, Dim, Fixed, Flag, In, InOut, Out, Place, Word, kernel, one_per
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Storage, Tensor, align, persistent
from wgpu_lora.gpu.tunable import Arrays, Constants
from wgpu_lora.ops.half import matmul_operand
from wgpu_lora.ops.matmul import FILE, adapted, divisibility, finish, operand, tile_grid
from wgpu_lora.ops.matmul_tuning import MatmulTuning, product_part, tilings
from wgpu_lora.ops.linear import LowRank
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import PIECE_BYTES, Loading, MatrixSource, Shared, read
from wgpu_lora.weights.dense import DTYPES
from wgpu_lora.weights.nf4_bitsandbytes import BitsAndBytesNF4
from wgpu_lora.weights.nf4_codes import (
    BLOCK,
    DYNAMIC_CODE,
    NAME,
    NESTED_BLOCK,
    NF4_MIDPOINTS,
    PARTS,
    decode_parts,
    decode_words,
    double_quantize,
    from_words,
    round_trip,
    to_words,
)
from wgpu_lora.weights.packed import Packed


def _facts(c: Any) -> dict[str, bool]:
    """Whether b's rows are whole words, and whole blocks of one scale, and whether the number of rows is even."""
    words = c.k if c.form == "nt" else c.n
    return divisibility(c) | {
        "octets": words % 8 == 0,
        "blocks": words % BLOCK == 0,
        "even_k": c.form == "nn" and c.k % 2 == 0,
    }


def _synthetic(c: Constants, rng: np.random.Generator) -> Arrays:
    """Codes and scales of a random W [out, in], with random padding in the nibbles past the last column."""
    out, size_in = (c["n"], c["k"]) if c["form"] == "nt" else (c["k"], c["n"])
    codes = rng.integers(0, 2**32, (-(-size_in // 8), out), np.uint32)
    return {"codes": codes, "scales": rng.random(-(-out * size_in // BLOCK), np.float32) + np.float32(0.5)}


def _columns(arrays: Arrays, c: Constants, columns: np.ndarray) -> Arrays | None:
    """None if blocks of one scale continue in W's next row."""
    n, k, codes, scales = c["n"], c["k"], arrays["codes"], arrays["scales"]
    if (k if c["form"] == "nt" else n) % BLOCK:
        return None
    if c["form"] == "nt":
        return {"codes": codes.reshape(-1, n)[:, columns], "scales": scales.reshape(n, -1)[columns]}
    words, blocks = columns[::8] // 8, columns[::BLOCK] // BLOCK
    return {"codes": codes.reshape(-1, k)[words], "scales": scales.reshape(k, -1)[:, blocks]}


SHAPES = ((16, 4), (16, 2), (8, 4))  # (rows, columns per lane) of the tilings
TUNING, PART = MatmulTuning(_synthetic), product_part(_columns)


@kernel(
    FILE,
    grid=tile_grid,
    variants=tilings(8, *SHAPES, software=(16, 8, 8)),
    specialise=_facts,
    tuning=TUNING,
    part=PART,
    lib=("nf4",),
)
def nf4_matmul(
    a: In,
    codes: Fixed,
    scales: In,
    y: InOut,
    bias: Fixed = None,
    a_scale: In = None,
    h: In = None,
    factor: Fixed = None,
    ranges: Fixed = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    rank: Dim = 0,
    h_skip: Dim = 0,
    h_first: Place[Dim] = 0,
    stride: Dim = 0,
    first_row: Place[Dim] = 0,
    accumulate: Flag = False,
    b_type: Word = "nf4",
    a_type: Word = "f32",
    form: Word = "nt",
) -> Any:
    """y[m, n] (+)= a_scale[m] sum_k a[m, k] W[n, k] (+ bias[n]) (+ h factor^T, see `adapted`) for an NF4 W[n, k]."""
    product = operand(a, m, k, a_scale) @ decode_words(codes, scales, n, k).T
    product = product + adapted(h, factor, ranges, m, n, rank, h_first, stride, first_row, form)
    return finish(y.reshape(m, n), product, accumulate, bias)


@kernel(
    FILE,
    grid=tile_grid,
    variants=tilings(4, *SHAPES, software=(16, 8, 8), beside=68),
    specialise=_facts,
    tuning=TUNING,
    part=PART,
    lib=("nf4",),
)
def nf4_matmul_backward(
    a: In,
    codes: Fixed,
    scales: In,
    y: InOut,
    a_scale: In = None,
    h: In = None,
    factor: Fixed = None,
    ranges: Fixed = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    rank: Dim = 0,
    h_skip: Dim = 0,
    h_first: Place[Dim] = 0,
    stride: Dim = 0,
    first_row: Place[Dim] = 0,
    accumulate: Flag = False,
    b_type: Word = "nf4",
    a_type: Word = "f32",
    form: Word = "nn",
) -> Any:
    """dx[m, n] (+)= a_scale[m] sum_k dy[m, k] W[k, n] (+ h factor, see `adapted`) for an NF4 W[k, n], from the same codes
    as forward."""
    product = operand(a, m, k, a_scale) @ decode_words(codes, scales, k, n)
    product = product + adapted(h, factor, ranges, m, n, rank, h_first, stride, first_row, form)
    return finish(y.reshape(m, n), product, accumulate)


@kernel("nf4_absmax.wgsl.j2", grid=lambda c: one_per(-(-c.size // BLOCK)), lib=("linear", "half"))
def nf4_absmax(w: Fixed, absmax: Out, *, size: U32, b_type: Word = "f32") -> Any:
    """absmax[b] = max |w| over block b of 64 flattened values; the last block may be shorter."""
    flat = np.abs(w.reshape(-1)[:size])
    return np.maximum.reduceat(flat, np.arange(0, size, BLOCK))


@kernel("nf4_encode.wgsl.j2", grid=lambda c: one_per(c.rows * -(-c.size_in // 8)), lib=("linear", "half"))
def nf4_encode(
    w: Fixed, absmax: In, codes: InOut, *, rows: Dim, first: Place[Dim], out: Dim, size_in: Dim, b_type: Word = "f32"
) -> Any:
    """codes[k8, first + n] = the nearest NF4 codes of w[n, 8 k8 .. 8 k8 + 7], for the `rows` rows of w."""
    scale = 1 / np.maximum(np.repeat(absmax, BLOCK)[: rows * size_in], 1e-38)
    nearest = np.searchsorted(NF4_MIDPOINTS.astype(np.float64), w.reshape(-1)[: rows * size_in] * scale)
    padded = np.zeros((rows, -(-size_in // 8) * 8), np.uint64)
    padded[:, :size_in] = nearest.reshape(rows, size_in)
    words = (padded.reshape(rows, -1, 8) << (4 * np.arange(8, dtype=np.uint64))).sum(axis=2)
    result = codes.reshape(-1, out).copy()
    result[:, first : first + rows] = words.T
    return result


@kernel("nf4_scales.wgsl", grid=lambda c: one_per(c.blocks), lib=("linear",))
def nf4_scales(absmax_codes: Fixed, nested: Fixed, dynamic: Fixed, scales: Out, *, blocks: U32) -> Any:
    """scales[b] = dynamic[absmax_codes[b]] * nested[b / 256] + offset, where the offset is nested's last entry."""
    codes = absmax_codes.reshape(-1)[:blocks].astype(int)
    return dynamic[codes] * np.repeat(nested[:-1], NESTED_BLOCK)[:blocks] + nested[-1]


@dataclass(frozen=True)
class NF4Weight:
    """4-bit codes with double-quantised constants. Forward and backward read the same codes.

    codes: u32 [ceil(in / 8), out]; word (k8, n) packs W[n, 8 k8 .. 8 k8 + 7], lowest nibble first.
    constants: absmax_codes u8 [blocks], nested f32 [ceil(blocks / 256) + 1] whose last entry is the offset, and dynamic
        f32 [256]; or only absmax f32 [blocks], for checkpoints without double quantisation.
    stored: the file has it in NF4, so it is loaded without requantising.
    """

    out_features: int
    in_features: int
    codes: Tensor
    constants: tuple[Tensor, ...]
    stored: bool
    format: ClassVar[str] = NAME

    def decoded_scales(self, rec: Recorder) -> Tensor:
        # Decoded to one f32 per block, into scratch before each product, or once if the recorder keeps them.
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

    def product(self) -> NF4Product:
        return NF4Product(self)

    def forward(self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        NF4Product(self).forward(rec, x, y, bias, accumulate, None)

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool) -> None:
        NF4Product(self).backward(rec, dy, dx, accumulate, None)

    def storages(self) -> list[Storage]:
        return [t.storage for t in (self.codes, *self.constants)]

    # -- contents --------------------------------------------------------------------------------------------------

    def scratch(self) -> Mapping[str, int]:
        if self.stored:
            return {}
        _, rows = next(self.pieces())
        return {"staging": rows * self.in_features, "absmax": align(4 * self.blocks(rows)) // 4}

    def blocks(self, rows: int) -> int:
        """How many blocks this many rows have."""
        return -(-rows * self.in_features // BLOCK)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yields (first row, rows) of the pieces packed at a time, the largest first. They start at whole blocks."""
        step = max(BLOCK, PIECE_BYTES // (4 * self.in_features) // BLOCK * BLOCK)
        for first in range(0, self.out_features, step):
            yield first, min(step, self.out_features - first)

    def record_packing(self, program: Program, w: Tensor, absmax: Tensor, first: int, rows: int, dtype: str) -> None:
        """Records the packing of W's rows [first, first + rows) from w. absmax: f32 [blocks], is computed too."""
        out, size_in = self.out_features, self.in_features
        program.dispatch(nf4_absmax, w, absmax, size=rows * size_in, b_type=dtype)
        shape: dict[str, Any] = {"rows": rows, "first": first, "out": out, "size_in": size_in, "b_type": dtype}
        program.dispatch(nf4_encode, w, absmax, self.codes, **shape)

    def load(self, loading: Loading, source: MatrixSource, name: str) -> None:
        packed = source.packed(name)
        if packed is None:
            self._pack(loading, source, name)
            return
        codes, *constants = packed.read()
        loading.device.write(self.codes.storage.buffer, to_words(codes, packed.shape))
        self._write_constants(loading.device, *constants)

    def _pack(self, loading: Loading, source: MatrixSource, name: str) -> None:
        """Quantises on the device. Only the block constants, 1/64 of the values, are quantised on the host."""
        device, staging, absmax = loading.device, loading.scratch["staging"], loading.scratch["absmax"]
        found = []
        for first, rows in self.pieces():
            device.write(staging.storage.buffer, source.read_raw(name, first, first + rows))
            program, dtype = Program(device, "pack"), DTYPES[source.dtype(name)]
            values = replace(staging, shape=(rows, self.in_features), dtype=dtype)
            self.record_packing(program, values, replace(absmax, shape=(self.blocks(rows),)), first, rows, dtype)
            with loading.running(program):
                found.append(device.read(absmax.storage.buffer, 4 * self.blocks(rows)).view(np.float32).copy())
        with np.errstate(invalid="ignore"):  # models.audit reports non-finite values
            codes, nested, offset = double_quantize(np.concatenate(found))
        self._write_constants(device, codes, np.append(nested, offset).astype(np.float32))

    def _write_constants(self, device: Device, *found: np.ndarray) -> None:
        for tensor, values in zip(self.constants, (*found, DYNAMIC_CODE), strict=False):
            device.write(tensor.storage.buffer, values)

    def packed(self, device: Device) -> Packed:
        shape = (self.out_features, self.in_features)
        codes, *constants = (read(device, tensor) for tensor in (self.codes, *self.constants[:2]))
        arrays = (from_words(codes, shape), *constants)
        return Packed(self.format, shape, PARTS[: len(arrays)], lambda: arrays)

    def values(self, device: Device) -> np.ndarray:
        return decode_parts(self.packed(device).read(), (self.out_features, self.in_features))

    def synthetic(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, np.ndarray]]:
        yield self.codes, rng.integers(0, 2**32, self.codes.shape, np.uint32)
        if len(self.constants) > 1:
            yield self.constants[0], rng.integers(0, 256, self.constants[0].shape, np.uint8)
            yield self.constants[2], DYNAMIC_CODE
        scale = self.constants[min(1, len(self.constants) - 1)]
        yield scale, (0.01 + 0.01 * rng.random(scale.shape)).astype(np.float32)


@dataclass(frozen=True)
class NF4Product:
    """The product with an NF4 matrix, and what LoRA adds."""

    weight: NF4Weight

    def adds(self, rec: Recorder, bias: bool) -> bool:
        return not (bias and rec.compute_dtype == "f16")  # with scales of x's rows there would be nine bindings

    def forward(
        self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool, low: LowRank | None
    ) -> None:
        out, size_in = self.weight.out_features, self.weight.in_features
        a, scale, kind = matmul_operand(rec, x, size_in, keep=True)
        shape = {"m": x.size // size_in, "n": out, "k": size_in, "a_type": kind, "accumulate": accumulate}
        tensors = a, self.weight.codes, self.weight.decoded_scales(rec), y, bias, scale
        rec.dispatch(nf4_matmul, *tensors, *(low.tensors if low else ()), **shape, **(low.constants if low else {}))

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool, low: LowRank | None) -> None:
        out, size_in = self.weight.out_features, self.weight.in_features
        a, scale, kind = matmul_operand(rec, dy, out, keep=False)
        shape = {"m": dy.size // out, "n": size_in, "k": out, "a_type": kind, "accumulate": accumulate}
        tensors = a, self.weight.codes, self.weight.decoded_scales(rec), dx, scale
        added = (low.tensors, low.constants) if low else ((), {})
        rec.dispatch(nf4_matmul_backward, *tensors, *added[0], **shape, **added[1])


class _NF4:
    """The base format."""

    name = NAME
    packed_form = BitsAndBytesNF4()
    bits = 4 + 8 / BLOCK + 32 / (BLOCK * NESTED_BLOCK)

    def declare(self, shape: tuple[int, int], name: str, shared: Shared, packed: Packed | None = None) -> NF4Weight:
        out, size_in = shape
        blocks, stored = -(-out * size_in // BLOCK), packed is not None
        codes = persistent((-(-size_in // 8), out), "u32", "base", f"{name}.codes")
        if packed and len(packed.parts) == 2:
            return NF4Weight(out, size_in, codes, (persistent((blocks,), "f32", "base", f"{name}.absmax"),), stored)
        absmax_codes = persistent((blocks,), "u8", "base", f"{name}.absmax_codes")
        nested = persistent((-(-blocks // NESTED_BLOCK) + 1,), "f32", "base", f"{name}.nested")
        dynamic = shared.tables.setdefault("dynamic code", persistent((256,), "f32", "base", "dynamic code"))
        return NF4Weight(out, size_in, codes, (absmax_codes, nested, dynamic), stored)

    def round_trip(self, w: np.ndarray) -> np.ndarray:
        return round_trip(w)


NF4 = _NF4()
