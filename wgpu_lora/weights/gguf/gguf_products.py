"""Kernels of matrices in the types of GGUF files: packing, products, and rows of tables."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import F32, U32, Dim, Flag, In, InOut, Offset, ReadOnly, Word, kernel, linear_grid
from wgpu_lora.gpu.reference_values import Part
from wgpu_lora.gpu.tiling import Arrays, Constants
from wgpu_lora.ops.embedding import local_rows, put_rows
from wgpu_lora.ops.loss.sparse_logits import add_rows
from wgpu_lora.ops.matmul.matmul import FILE, adapted, divisibility, finish, operand, tile_grid
from wgpu_lora.ops.matmul.matmul_layout import product_layout, words_of
from wgpu_lora.ops.matmul.matmul_tuning import MatmulTuning, product_part, tilings
from wgpu_lora.ops.matmul.matrix_stack import ALL_PARTS, backward_reference, forward_reference, join, sizes
from wgpu_lora.weights.gguf.gguf_formats import FORMATS, GGUFFormat, random_blocks


def _pack_facts(c: Any) -> dict[str, Any]:
    item = FORMATS[c.b_type]
    names = ("words", "half", "block", "block_bytes")
    return {"planes": tuple(map(astuple, item.planes)), **{name: getattr(item, name) for name in names}}


def _pack_grid(c: Any) -> Any:
    item = FORMATS[c.b_type]
    return linear_grid(c.rows * (item.code_rows(c.size_in) + item.scale_rows(c.size_in)))


@kernel("gguf_pack.wgsl.j2", grid=_pack_grid, specialise=_pack_facts, lib=("linear",))
def gguf_pack(
    blocks: ReadOnly,
    codes: InOut,
    scales: InOut,
    *,
    rows: Dim,
    first: Offset[Dim],
    out: Dim,
    size_in: Dim,
    b_type: Word,
) -> Any:
    """codes and scales[:, first ..+ rows] = those of the rows whose blocks are in `blocks`, as in a GGUF file."""
    item = FORMATS[b_type]
    of_file = np.ascontiguousarray(blocks).astype(np.uint32).reshape(-1).view(np.uint8)
    size = rows * size_in // item.block * item.block_bytes
    result = [codes.reshape(-1, out).copy(), scales.reshape(-1, out).copy()]
    for into, words in zip(result, item.to_words(of_file[:size].reshape(rows, -1)), strict=True):
        into[:, first : first + rows] = words
    return tuple(result)


def _layout_facts(item: GGUFFormat) -> dict[str, Any]:
    """What `shaders/matmul/operands/packed.wgsl.j2` reads."""
    return {
        "file": item.name,
        "planes": tuple(plane.bits for plane in item.planes),
        "levels": "iq4" if item.codebook else "",
        "scale_steps": item.group,
        "scale_word": "u32",
    }


def _facts(c: Any) -> dict[str, Any]:
    fours = [*sizes(vars(c), "k"), c.w_skip, c.w_first]
    quad_k = c.form == "nn" and all(count % 4 == 0 for count in fours)
    return divisibility(c) | {"octets": True, "quad_k": quad_k} | _layout_facts(FORMATS[c.b_type])


def _shape(c: Constants) -> tuple[list[int], int]:
    """The numbers of rows of the matrices, with those outside of a range, and of their columns."""
    name, size_in = ("n", c["k"]) if c["form"] == "nt" else ("k", c["n"])
    return [count + c["w_skip"] for count in sizes(c, name)], size_in


def _of_parts(c: Constants) -> dict[str, tuple[list[int], int]]:
    """The numbers of codes and scales of a stack's parts, and bytes of each."""
    (outs, size_in), item = _shape(c), FORMATS[c["b_type"]]
    code_rows, scale_rows = item.code_rows(size_in), item.scale_rows(size_in)
    return {"codes": ([code_rows * n for n in outs], 4), "scales": ([scale_rows * n for n in outs], 4)}


def _synthetic(c: Constants, rng: np.random.Generator) -> Arrays:
    (outs, size_in), item = _shape(c), FORMATS[c["b_type"]]
    parts = [item.to_words(random_blocks(item, out, size_in, rng)) for out in outs]
    if not c["stacked"]:
        return dict(zip(("codes", "scales"), parts[0], strict=True))
    return {name: join(words) for name, words in zip(("codes", "scales"), zip(*parts, strict=True), strict=True)}


def _columns(arrays: Arrays, c: Constants, columns: np.ndarray) -> Arrays | None:
    """Forward, columns are rows of W; backward they may be parts of a block."""
    if c["form"] != "nt":
        return None
    out = c["n"] + c["w_skip"]
    return {name: arrays[name].reshape(-1, out)[:, c["w_first"] + columns] for name in ("codes", "scales")}


SHAPES = ((16, 4), (16, 2), (8, 4))  # (rows, columns per lane) of the tilings
TUNING = MatmulTuning(_synthetic, lambda c: FORMATS[c["b_type"]].block)
PART = product_part(_columns)


def _decoded(c: Constants, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    (out,), size_in = _shape(c)
    rows = c["n"] if c["form"] == "nt" else c["k"]
    return FORMATS[c["b_type"]].decode(codes, scales, out, size_in)[c["w_first"] : c["w_first"] + rows]


@kernel(
    FILE,
    grid=tile_grid,
    variants=tilings(8, *SHAPES),
    specialise=_facts,
    layout=product_layout,
    tuning=TUNING,
    part=PART,
    lib=("ggml",),
)
def gguf_matmul(
    a: In,
    codes: ReadOnly,
    scales: In,
    y: InOut,
    bias: ReadOnly = None,
    count: ReadOnly = None,
    a_scale: In = None,
    h: In = None,
    factor: ReadOnly = None,
    ranges: ReadOnly = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    w_skip: Dim = 0,
    w_first: Offset[Dim] = 0,
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
    b_type: Word = "q8_0",
    a_type: Word = "f32",
    form: Word = "nt",
) -> Any:
    """y[m, n] (+)= a_scale[m] sum_k a[m, k] W[w_first + n, k] (+ bias[n]) (+ h factor^T, see `adapted`) for a W of
    n + w_skip rows in a type of GGUF files; tiles past row count[0] are skipped. stacked, gated:
    ops.matmul.matrix_stack."""
    c = locals()
    arrays = {name: c.pop(name) for name in gguf_matmul.bindings}
    if stacked:
        return forward_reference(gguf_matmul, arrays, c, _of_parts(c))
    product = operand(a, m, k, a_scale) @ _decoded(c, codes, scales).T
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
    lib=("ggml",),
)
def gguf_matmul_backward(
    a: In,
    codes: ReadOnly,
    scales: In,
    y: InOut,
    row_scale: In = None,
    count: ReadOnly = None,
    a_scale: In = None,
    h: In = None,
    factor: ReadOnly = None,
    ranges: ReadOnly = None,
    *,
    m: Dim,
    n: Dim,
    k: Dim,
    w_skip: Dim = 0,
    w_first: Offset[Dim] = 0,
    rank: Dim = 0,
    h_skip: Dim = 0,
    h_first: Offset[Dim] = 0,
    stride: Dim = 0,
    first_row: Offset[Dim] = 0,
    k1: Dim = 0,
    k2: Dim = 0,
    accumulate: Flag = False,
    stacked: Flag = False,
    b_type: Word = "q8_0",
    a_type: Word = "f32",
    form: Word = "nn",
) -> Any:
    """dx[m, n] (+)= a_scale[m] sum_k dy[m, k] W[w_first + k, n] (+ h factor, see `adapted`), from the same codes as
    forward; with row_scale, dx[m] is scaled by row_scale[m] first. stacked: see ops.matmul.matrix_stack."""
    c = locals()
    arrays = {name: c.pop(name) for name in gguf_matmul_backward.bindings}
    if stacked:
        return backward_reference(gguf_matmul_backward, arrays, c, _of_parts(c))
    product = operand(a, m, k, a_scale) @ _decoded(c, codes, scales)
    product = product + adapted(h, factor, ranges, m, n, rank, h_first, stride, first_row, form)
    return finish(y.reshape(m, n), product, accumulate, None, row_scale)


def _row_facts(c: Any) -> dict[str, Any]:
    return _layout_facts(FORMATS[c.b_type])


def _row_layout(c: Constants, *_: Any) -> Any:
    return words_of(c["planes"], 8)


def _used_rows(arrays: Arrays, c: Constants, size: str = "count") -> Part:
    """A part with only the rows of the table that the ids use."""
    rows, renamed = local_rows(arrays["ids"], c["first"], c[size])
    words = {name: arrays[name].reshape(-1, c[size])[:, rows - c["first"]] for name in ("codes", "scales")}
    return {**arrays, "ids": renamed, **words}, {**c, "first": 0, size: rows.size}


@kernel(
    "embedding.wgsl.j2",
    grid=lambda c: linear_grid(c.rows * c.cols),
    specialise=_row_facts,
    layout=_row_layout,
    part=_used_rows,
    lib=("linear", "ggml"),
)
def gguf_rows(
    ids: ReadOnly, codes: ReadOnly, scales: In, y: InOut, *, rows: U32, cols: U32, first: Offset[U32], count: U32,
    b_type: Word = "q8_0", scale: F32 = 1.0,
) -> Any:  # fmt: skip
    """`ops.embedding.embedding_rows` of a table in a type of GGUF files."""
    return put_rows(ids, FORMATS[b_type].decode(codes, scales, count, cols), y, first, scale)


@kernel(
    "support_product.wgsl.j2",
    grid=lambda c: linear_grid(c.rows * c.cols),
    specialise=_row_facts,
    layout=_row_layout,
    part=partial(_used_rows, size="size"),
    lib=("linear", "ggml"),
)
def gguf_support_product(
    weights: In, ids: In, count: ReadOnly, codes: ReadOnly, scales: In, y: InOut, *, rows: U32, kept: U32, cols: U32,
    first: Offset[U32], size: U32, b_type: Word = "q8_0",
) -> Any:  # fmt: skip
    """`ops.loss.sparse_logits.support_product` of a table in a type of GGUF files."""
    return add_rows(weights, ids, count, FORMATS[b_type].decode(codes, scales, size, cols), y, rows, first)
