"""What the template of the matrix products derives from a call: offsets of operands, neighbouring columns, words."""

from __future__ import annotations

from typing import Any

import pytest

from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.ops.matmul.matmul import lora_nn, lora_nt, lora_tn, matmul_nn, matmul_nt
from wgpu_lora.ops.matmul.matmul_layout import Layout, product_layout, words_of
from wgpu_lora.weights.nf4.nf4_products import nf4_matmul, nf4_matmul_backward

BROADCAST = Tiling("broadcast", 32, rows=16, cols=4, span=4)
THIN = Tiling("thin", 8, rows=16, cols=8, span=4, wide=True)
LORA = ("h", "factor", "ranges")


def layout(kernel: Any, tile: Tiling = BROADCAST, present: tuple[str, ...] = (), **c: Any) -> Layout:
    constants = {**kernel.defaults, "m": 64, "n": 64, "k": 64, "slots": 2, "stride": 4096, **c}
    constants_of = {name: constants[name] for name in kernel.constants}
    return product_layout(kernel.compiled_in(constants_of), present, kernel.dims, tile)


def test_orientations() -> None:
    """b has its rows along the contraction in nt, else across; a thin tile has the operands exchanged."""
    assert (layout(matmul_nt).orientation, layout(matmul_nn).orientation) == ("nt", "nn")
    assert (layout(lora_tn, present=("ranges",)).left_columns, layout(matmul_nt).left_columns) == (True, False)
    thin = layout(lora_nt, THIN, ("ranges",))
    assert (thin.left.name, thin.right.name, thin.m, thin.n) == ("b", "a", "dims.n", "dims.m")
    assert thin.left.arguments == ", b0"
    assert layout(lora_nn, THIN, ("ranges",)).orientation == "nt"


def test_a_stack_has_variables_for_sizes_and_places() -> None:
    forward, backward = layout(matmul_nt, stacked=True, n1=64), layout(matmul_nn, stacked=True, k1=64)
    assert (forward.n, forward.right.base, forward.bias) == ("n", "part_b + ", "part_bias + ")
    assert forward.y_row == "part_y + row * (n + dims.y_skip) + dims.y_first"
    assert (backward.k, backward.left.row, backward.left.arguments) == ("size", "size + first", ", size, part_a")
    assert layout(nf4_matmul, stacked=True, n1=64).matrix == "Matrix(part_b, part_scales, n, dims.k)"
    assert layout(nf4_matmul_backward, k=64).matrix == "Matrix(0u, 0u, dims.k, dims.n)"


def test_lora_reads_its_own_rows_alone() -> None:
    adapted = layout(nf4_matmul, present=LORA, rank=8)
    assert adapted.adapted
    assert not adapted.grouped
    assert adapted.h.load("row", "k") == "select(vec4<f32>(), load_h(row, k, h0), row >= slot_first && row < slot_last)"
    assert adapted.left.load("row", "k") == "load_a(row, k)"


@pytest.mark.parametrize(
    ("kernel", "tile", "constants", "neighbours", "width"),
    [
        (matmul_nn, BROADCAST, {}, 1, 1),
        (matmul_nn, Tiling("broadcast", 8, 16, 8, 4, wide=True), {}, 2, 2),
        (matmul_nn, BROADCAST, {"b_type": "bf16"}, 2, 2),
        (matmul_nn, BROADCAST, {"b_type": "bf16", "n": 65}, 1, 1),
        (lora_tn, Tiling("broadcast", 8, 16, 8, 4, wide=True), {}, 4, 4),
        (lora_tn, Tiling("broadcast", 8, 16, 8, 4, wide=True), {"n": 66}, 2, 2),
    ],
)
def test_neighbouring_columns(kernel: Any, tile: Tiling, constants: Any, neighbours: int, width: int) -> None:
    memory_layout = layout(kernel, tile, **constants)
    assert (memory_layout.neighbours, memory_layout.right.width) == (neighbours, width)


@pytest.mark.parametrize(("n", "rank", "width"), [(64, 8, 4), (64, 5, 2), (66, 8, 2), (67, 8, 1)])
def test_a_packed_gradient_has_the_columns_of_its_words(n: int, rank: int, width: int) -> None:
    """The factor beside it is read in vectors of them, where its rows are whole vectors."""
    memory_layout = layout(nf4_matmul_backward, present=LORA, n=n, rank=rank, stride=4 * n * rank)
    assert (memory_layout.neighbours, memory_layout.packed_columns, memory_layout.factor.width) == (4, True, width)


def test_words() -> None:
    """Eight codes of 4 bits are a word, of 8 bits two; of 2 bits half a word, and of 1 bit a quarter."""
    nf4 = layout(nf4_matmul)
    assert nf4.bits(3, 1) == "word0_0_3_1"
    assert [word.inside for word in nf4.words] == [False]
    assert [word.inside for word in layout(nf4_matmul_backward).words] == [True]  # of four columns
    five, eight = words_of((4, 1), 8), words_of((8,), 8)
    assert [(word.bits, word.number, word.inside) for word in five] == [(4, 0, False), (1, 0, True)]
    assert five[1].row("at") == "(w.size_in * 4u + 31u) / 32u + at / 32u"
    assert five[1].shift("at") == " >> ((at & 31u) * 1u)"
    assert (eight[1].row("at"), eight[1].shift("at")) == ("at / 4u + 1u", "")
    assert [(word.name, word.inside) for word in eight] == [("word0_0", False), ("word0_1", False)]
    assert [word.used for word in words_of((8,), 4)] == [True, False]
