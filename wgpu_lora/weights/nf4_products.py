"""Kernels of the products with NF4 matrices, forward and input gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import Dim, Fixed, Flag, In, InOut, Place, Word, kernel
from wgpu_lora.gpu.tensor import Tensor, whole
from wgpu_lora.gpu.tunable import Arrays, Constants
from wgpu_lora.ops.half import gradient_operand, matmul_operand
from wgpu_lora.ops.low_rank import LowRank, columns_of, steps_of, tensors_of
from wgpu_lora.ops.matmul import FILE, adapted, divisibility, finish, operand, tile_grid
from wgpu_lora.ops.matmul_tuning import MatmulTuning, product_part, tilings
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.ops.stack import ALL_PARTS, by_columns, by_steps, region, sizes, sizes_of
from wgpu_lora.weights.nf4_codes import BLOCK, decode_words
from wgpu_lora.weights.nf4_scales import Scales


def _facts(c: Any) -> dict[str, bool]:
    """Whether b's rows are whole words, and whole blocks of one scale, and whether the number of rows is even."""
    words = c.k if c.form == "nt" else c.n
    return divisibility(c) | {
        "octets": words % 8 == 0,
        "blocks": words % BLOCK == 0,
        "even_k": c.form == "nn" and all(k % 2 == 0 for k in sizes(vars(c), "k")),
    }


def _of_parts(c: Constants) -> dict[str, tuple[list[int], int]]:
    """The numbers of codes and scales of a stack's parts, and bytes of each."""
    (size_in, name) = (c["k"], "n") if c["form"] == "nt" else (c["n"], "k")
    outs = sizes(c, name)
    return {"codes": ([-(-size_in // 8) * n for n in outs], 4), "scales": ([-(-n * size_in // BLOCK) for n in outs], 4)}


def _synthetic(c: Constants, rng: np.random.Generator) -> Arrays:
    """Codes and scales of a random W [out, in], with random padding in the nibbles past the last column."""
    if c["stacked"]:
        counts = {name: sum(map(region, found)) for name, (found, _) in _of_parts(c).items()}
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
    stacked, gated: see ops.stack."""
    if stacked:
        c = locals()
        arrays = {name: c.pop(name) for name in nf4_matmul.bindings}
        return by_columns(nf4_matmul, arrays, c, _of_parts(c))
    product = operand(a, m, k, a_scale) @ decode_words(codes, scales, n, k).T
    product = product + adapted(h, factor, ranges, m, n, rank, h_first, stride, first_row, form)
    return finish(y.reshape(m, n), product, accumulate, bias)


@kernel(
    FILE,
    grid=tile_grid,
    variants=tilings(4, *SHAPES, cpu_span=8, beside=68),
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
    k1: Dim = 0,
    k2: Dim = 0,
    accumulate: Flag = False,
    stacked: Flag = False,
    b_type: Word = "nf4",
    a_type: Word = "f32",
    form: Word = "nn",
) -> Any:
    """dx[m, n] (+)= a_scale[m] sum_k dy[m, k] W[k, n] (+ h factor, see `adapted`) for an NF4 W[k, n], from the same
    codes as forward. stacked: see ops.stack."""
    if stacked:
        c = locals()
        arrays = {name: c.pop(name) for name in nf4_matmul_backward.bindings}
        return by_steps(nf4_matmul_backward, arrays, c, _of_parts(c))
    product = operand(a, m, k, a_scale) @ decode_words(codes, scales, k, n)
    product = product + adapted(h, factor, ranges, m, n, rank, h_first, stride, first_row, form)
    return finish(y.reshape(m, n), product, accumulate)


@dataclass(frozen=True)
class NF4Product:
    """The product with NF4 matrices of these numbers of rows, stored together, and what LoRA adds.

    scales: of each matrix.
    """

    outs: tuple[int, ...]
    in_features: int
    codes: Tensor
    scales: tuple[Scales, ...]

    def adds(self, rec: Recorder, bias: bool) -> bool:
        return not (bias and rec.compute_dtype == "f16")  # with scales of x's rows there would be nine bindings

    def _scales(self, rec: Recorder) -> Tensor:
        found = whole([scales.of(rec) for scales in self.scales])
        assert found is not None, "the scales of a stack are in one storage"
        return found

    def forward(
        self,
        rec: Recorder,
        x: Tensor,
        y: Tensor,
        bias: Tensor | None,
        accumulate: bool,
        low: LowRank | None,
        gated: bool = False,
    ) -> None:
        a, scale, kind = matmul_operand(rec, x, self.in_features, keep=True)
        shape = {"m": x.size // self.in_features, "k": self.in_features, **sizes_of("n", self.outs), "a_type": kind}
        tensors = a, self.codes, self._scales(rec), y, bias, scale, *tensors_of(low)
        rec.dispatch(nf4_matmul, *tensors, accumulate=accumulate, gated=gated, **shape, **columns_of(low))

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool, low: LowRank | None) -> None:
        a, scale, kind = gradient_operand(rec, dy, self.outs)
        shape = {"m": dx.size // self.in_features, "n": self.in_features, **sizes_of("k", self.outs), "a_type": kind}
        tensors = a, self.codes, self._scales(rec), dx, scale, *tensors_of(low)
        rec.dispatch(nf4_matmul_backward, *tensors, accumulate=accumulate, **shape, **steps_of(low))
