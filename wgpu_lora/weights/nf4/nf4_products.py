"""Kernels of the products with NF4 matrices, forward and input gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import Dim, Flag, In, InOut, Offset, ReadOnly, Word, kernel, linear_grid
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor, persistent, share_storage, spanning
from wgpu_lora.gpu.tiling import Arrays, Constants
from wgpu_lora.ops.linear.frozen_product import FrozenProduct
from wgpu_lora.ops.matmul.matmul import FILE, adapted, divisibility, finish, operand, tile_grid
from wgpu_lora.ops.matmul.matmul_layout import product_layout
from wgpu_lora.ops.matmul.matmul_tuning import MatmulTuning, product_part, tilings
from wgpu_lora.ops.matmul.matrix_stack import ALL_PARTS, backward_reference, forward_reference, region, sizes, split
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.nf4.nf4_reference import BLOCK, NESTED_BLOCK, decode_words


def _facts(c: Any) -> dict[str, Any]:
    """The layout of W's codes and scales (see `shaders/matmul/operands/packed.wgsl.j2`)."""
    size_in = c.k if c.form == "nt" else c.n
    return divisibility(c) | {
        "octets": size_in % 8 == 0,
        "quad_k": c.form == "nn" and all(k % 4 == 0 for k in sizes(vars(c), "k")),
        "file": "nf4" if size_in % 8 == 0 else "nf4_ragged",
        "planes": (4,),
        "levels": "nf4",
        "scale_steps": 1 if size_in % 8 else BLOCK if size_in % BLOCK == 0 else 8,
        "scale_word": "f32",
    }


def _of_parts(c: Constants) -> dict[str, tuple[list[int], int]]:
    """The numbers of codes and scales of a stack's parts, and bytes of each."""
    (size_in, name) = (c["k"], "n") if c["form"] == "nt" else (c["n"], "k")
    outs = sizes(c, name)
    return {"codes": ([-(-size_in // 8) * n for n in outs], 4), "scales": ([-(-n * size_in // BLOCK) for n in outs], 4)}


def _synthetic(c: Constants, rng: np.random.Generator) -> Arrays:
    """Codes and scales of a random W [out, in], with random padding in the nibbles past the last column."""
    if c["stacked"]:
        counts = {name: sum(map(region, result)) for name, (result, _) in _of_parts(c).items()}
        codes = rng.integers(0, 2**32, counts["codes"], np.uint32)
        return {"codes": codes, "scales": rng.random(counts["scales"], np.float32) + np.float32(0.5)}
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
    variants=tilings(8, *SHAPES),
    specialise=_facts,
    layout=product_layout,
    tuning=TUNING,
    part=PART,
    lib=("nf4",),
)
def nf4_matmul(
    a: In,
    codes: ReadOnly,
    scales: In,
    y: InOut,
    bias: ReadOnly = None,
    a_scale: In = None,
    h: In = None,
    factor: ReadOnly = None,
    ranges: ReadOnly = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    rank: Dim = 0,
    h_skip: Dim = 0,
    h_first: Offset[Dim] = 0,
    stride: Dim = 0,
    first_row: Offset[Dim] = 0,
    n1: Dim = 0,
    n2: Dim = 0,
    accumulate: Flag = False,
    stacked: Flag = False,
    gated: Flag = False,
    adapted_parts: Word = ALL_PARTS,
    b_type: Word = "nf4",
    a_type: Word = "f32",
    form: Word = "nt",
) -> Any:
    """y[m, n] (+)= a_scale[m] sum_k a[m, k] W[n, k] (+ bias[n]) (+ h factor^T, see `adapted`) for an NF4 W[n, k].
    stacked, gated: see ops.matmul.matrix_stack."""
    if stacked:
        c = locals()
        arrays = {name: c.pop(name) for name in nf4_matmul.bindings}
        return forward_reference(nf4_matmul, arrays, c, _of_parts(c))
    product = operand(a, m, k, a_scale) @ decode_words(codes, scales, n, k).T
    product = product + adapted(h, factor, ranges, m, n, rank, h_first, stride, first_row, form)
    return finish(y.reshape(m, n), product, accumulate, bias)


@kernel(
    FILE,
    grid=tile_grid,
    variants=tilings(4, *SHAPES, cpu_span=8, other_registers=68),
    specialise=_facts,
    layout=product_layout,
    tuning=TUNING,
    part=PART,
    lib=("nf4",),
)
def nf4_matmul_backward(
    a: In,
    codes: ReadOnly,
    scales: In,
    y: InOut,
    a_scale: In = None,
    h: In = None,
    factor: ReadOnly = None,
    ranges: ReadOnly = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    rank: Dim = 0,
    h_skip: Dim = 0,
    h_first: Offset[Dim] = 0,
    stride: Dim = 0,
    first_row: Offset[Dim] = 0,
    k1: Dim = 0,
    k2: Dim = 0,
    accumulate: Flag = False,
    stacked: Flag = False,
    b_type: Word = "nf4",
    a_type: Word = "f32",
    form: Word = "nn",
) -> Any:
    """dx[m, n] (+)= a_scale[m] sum_k dy[m, k] W[k, n] (+ h factor, see `adapted`) for an NF4 W[k, n], from the same
    codes as forward. stacked: see ops.matmul.matrix_stack."""
    if stacked:
        c = locals()
        arrays = {name: c.pop(name) for name in nf4_matmul_backward.bindings}
        return backward_reference(nf4_matmul_backward, arrays, c, _of_parts(c))
    product = operand(a, m, k, a_scale) @ decode_words(codes, scales, k, n)
    product = product + adapted(h, factor, ranges, m, n, rank, h_first, stride, first_row, form)
    return finish(y.reshape(m, n), product, accumulate)


def nf4_product(outs: tuple[int, ...], in_features: int, codes: Tensor, scales: Sequence[Scales]) -> FrozenProduct:
    """The product with NF4 matrices of these numbers of rows, stored together, and the scales of each."""

    def tensors(rec: Recorder) -> dict[str, Tensor]:
        decoded = spanning([item.of(rec) for item in scales])
        assert decoded is not None, "the scales of a stack are in one storage"
        return {"codes": codes, "scales": decoded}

    return FrozenProduct(outs, in_features, nf4_matmul, nf4_matmul_backward, tensors, {})


MATRICES = 7  # that a dispatch decodes at most
COUNTS = ("blocks", *(f"blocks{i}" for i in range(1, MATRICES)))


def _counts(c: Any) -> list[int]:
    return [count for count in (getattr(c, name) for name in COUNTS) if count]


@kernel("nf4_scales.wgsl.j2", grid=lambda c: linear_grid(sum(region(n, 1) for n in _counts(c))), lib=("linear",))
def nf4_scales(
    absmax_codes: ReadOnly,
    nested: ReadOnly,
    dynamic: ReadOnly,
    scales: InOut,
    *,
    blocks: Dim,
    blocks1: Dim = 0,
    blocks2: Dim = 0,
    blocks3: Dim = 0,
    blocks4: Dim = 0,
    blocks5: Dim = 0,
    blocks6: Dim = 0,
) -> Any:
    """scales[b] = dynamic[absmax_codes[b]] * nested[b / 256] + offset, where the offset is nested's last entry; of
    several tensors, which are regions of the arrays."""
    counts = [count for count in (blocks, blocks1, blocks2, blocks3, blocks4, blocks5, blocks6) if count]
    result = scales.reshape(-1).copy()
    codes, coarse = split(absmax_codes, counts, 1), split(nested, [-(-n // NESTED_BLOCK) + 1 for n in counts])
    for own, wide, into in zip(codes, coarse, split(result, counts), strict=True):
        into[:] = dynamic[own.astype(int)] * np.repeat(wide[:-1], NESTED_BLOCK)[: own.size] + wide[-1]
    return result


@dataclass(frozen=True)
class LayerScales:
    """The constants of up to MATRICES matrices, as in NF4Weight, in successive regions of shared storages."""

    constants: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def together(cls, constants: Sequence[tuple[Tensor, ...]], name: str) -> LayerScales:
        """Declared constants of several matrices in shared storages, but for the table that all models share."""
        if len(constants) == 1:
            return cls(tuple(constants))
        codes = share_storage([own[0] for own in constants], f"{name}.absmax_codes")
        nested = share_storage([own[1] for own in constants], f"{name}.nested")
        tables = [own[2] for own in constants]
        return cls(tuple(zip(codes, nested, tables, strict=True)))

    def decoded(self, rec: Recorder) -> Sequence[Tensor]:
        """One f32 per block, by matrix: in scratch, once for products that follow each other, or kept."""
        source, counts = self.constants[0][0].storage, [own[0].size for own in self.constants]
        if rec.shared_tensors is None:
            return rec.latest(
                source, lambda: self._decode(rec.program, rec.temps(*((n,) for n in counts), name="scales"))
            )
        if source not in rec.shared_tensors.tensors:
            new = share_storage([persistent((count,), "f32", "workspace", "scales") for count in counts], "scales")
            rec.shared_tensors.tensors[source] = self._decode(rec.shared_tensors.program, new)
        return rec.shared_tensors.tensors[source]

    def _decode(self, program: Program, scales: Sequence[Tensor]) -> Sequence[Tensor]:
        codes, nested = (spanning([own[i] for own in self.constants]) for i in (0, 1))
        blocks: dict[str, Any] = {n: own[0].size for n, own in zip(COUNTS, self.constants, strict=False)}
        program.dispatch(nf4_scales, codes, nested, self.constants[0][2], spanning(scales), **blocks)
        return scales


@dataclass(frozen=True)
class Scales:
    """The scales of a matrix: decoded with those of its layer, or stored as they are."""

    layer: LayerScales | None
    index: int
    values: Tensor | None = None

    def of(self, rec: Recorder) -> Tensor:
        """f32 [blocks]."""
        if self.values:
            return self.values
        assert self.layer is not None
        return self.layer.decoded(rec)[self.index]
