"""Cases of matrices in the types of GGUF files."""

from __future__ import annotations

import numpy as np

from support.kernels import Arrays, add, normal, u32
from support.kernels.matmul import adapted, product
from wgpu_lora.weights.gguf import gguf_products
from wgpu_lora.weights.gguf.gguf_formats import FORMATS, random_blocks

FORWARD, BACKWARD = gguf_products.gguf_matmul, gguf_products.gguf_matmul_backward

# Each type in both products: ragged columns, several blocks of a row, an odd number of half floats. One tiling,
# because a type is decoded alike in all.
for name, item in FORMATS.items():
    size_in = 768 if item.block == 256 else 96
    product(FORWARD, 17, 35, size_in, b_type=name, bias=True, slow=True)
    product(FORWARD, 3, 70, size_in, b_type=name, accumulate=True, slow=True)
    product(BACKWARD, 17, size_in, 37, b_type=name, accumulate=True, slow=True)
    product(BACKWARD, 3, size_in, 40, b_type=name, slow=True)

# What the products do besides, with types of one plane and of two, of a word of scales and of several.
product(FORWARD, 9, 66, 64, b_type="q4_1", bias=True, stacked=True, n1=22, n2=34)
product(FORWARD, 3, 70, 512, b_type="q6_k", bias=True, stacked=True, gated=True, n1=70)
product(BACKWARD, 9, 256, 36, b_type="q4_k", stacked=True, k1=12, k2=40, a_type="bf16")
product(BACKWARD, 17, 64, 5, b_type="q5_0", stacked=True, k1=21)
product(FORWARD, 17, 70, 128, b_type="q8_0", a_type="f16", a_scale=True, bias=True)
product(BACKWARD, 9, 96, 21, b_type="q5_1", a_type="f16", a_scale=True)
adapted(FORWARD, 70, 64, 8, b_type="q5_1", h_skip=16, n1=66, n2=20, stacked=True)
adapted(FORWARD, 67, 256, 5, b_type="iq4_xs", accumulate=True)
adapted(BACKWARD, 96, 36, 12, b_type="iq4_nl", accumulate=True)
adapted(BACKWARD, 256, 21, 7, b_type="q5_k", padding=3, first_row=5)
# a range of a table's rows
product(FORWARD, 41, 128, 96, b_type="q8_0", w_skip=60, w_first=40, count=9)
product(FORWARD, 2, 30, 256, b_type="q6_k", w_skip=39, w_first=8)
product(BACKWARD, 41, 96, 52, b_type="q8_0", w_skip=28, w_first=20, row_scale=True, count=9)
product(BACKWARD, 5, 256, 13, b_type="q4_k", w_skip=26, w_first=7, row_scale=True)


def pack(name: str, rows: int, size_in: int, first: int, out: int) -> None:
    item = FORMATS[name]

    def make(rng: np.random.Generator) -> Arrays:
        blocks = random_blocks(item, rows, size_in, rng).reshape(-1)
        shapes = {"codes": (item.code_rows(size_in), out), "scales": (item.scale_rows(size_in), out)}
        old = {key: rng.integers(0, 2**32, shape, np.uint32) for key, shape in shapes.items()}
        return {"blocks": np.pad(blocks, (0, -blocks.size % 4)).view(np.uint32), **old}

    add(gguf_products.gguf_pack, make, rows=rows, first=first, out=out, size_in=size_in, b_type=name)


for name, item in FORMATS.items():
    pack(name, 5, 3 * item.block, 2, 9)


def lookup(name: str, size_in: int) -> None:
    item = FORMATS[name]

    def table(rng: np.random.Generator, rows: int) -> Arrays:
        return dict(zip(("codes", "scales"), item.to_words(random_blocks(item, rows, size_in, rng)), strict=True))

    def make(rng: np.random.Generator) -> Arrays:
        return {"ids": u32(12, 7, 3, 20, 7), **table(rng, 10), "y": normal(rng, 5, size_in)}

    def make_support(rng: np.random.Generator) -> Arrays:
        ids = rng.integers(0, 20, (5, 3)).astype(np.uint32)
        return {
            "weights": normal(rng, 5, 3),
            "ids": ids,
            "count": u32(4),
            **table(rng, 10),
            "y": normal(rng, 5, size_in),
        }

    shape = {"rows": 5, "cols": size_in, "first": 5, "b_type": name}
    add(gguf_products.gguf_rows, make, count=10, scale=1.5, **shape)
    add(gguf_products.gguf_support_product, make_support, kept=3, size=10, **shape)


lookup("q8_0", 96)
lookup("q6_k", 512)
lookup("q4_1", 64)
lookup("iq4_xs", 256)
