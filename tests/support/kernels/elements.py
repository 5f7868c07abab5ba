"""Cases of the kernels that work value by value, and of tables and codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.kernels import NONE, Arrays, add, normal, poison
from wgpu_lora.bench import device_ceilings
from wgpu_lora.gpu.kernel import cdiv
from wgpu_lora.gpu.reference_values import as_float64, random_values
from wgpu_lora.ops import elementwise, embedding
from wgpu_lora.ops import elementwise as columns
from wgpu_lora.ops import embedding as capped
from wgpu_lora.ops.attention import rope
from wgpu_lora.weights.nf4 import nf4, nf4_products
from wgpu_lora.weights.nf4.nf4_reference import DYNAMIC_CODE


def arrays_of(rng: np.random.Generator, size: int, inputs: str, outputs: str) -> Arrays:
    return {**{n: 3 * normal(rng, size) for n in inputs.split()}, **{n: poison(size) for n in outputs.split()}}


for kernel, inputs, outputs in (
    (elementwise.swiglu_forward, "gate up", "y"),
    (elementwise.swiglu_backward, "gate up dy", "dgate dup"),
    (elementwise.geglu_forward, "gate up", "y"),
    (elementwise.geglu_backward, "gate up dy", "dgate dup"),
    (elementwise.add_forward, "a b", "y"),
    (elementwise.copy, "x", "y"),
):
    for size in (4 * 64 + 37, 8 * 64 + 36):  # singly, and by fours
        add(kernel, lambda rng, i=inputs, o=outputs, n=size: arrays_of(rng, n, i, o), size=size)
add(
    device_ceilings.fma_chains,
    lambda rng: {"x": rng.uniform(0.3, 0.7, 67).astype(np.float32), "y": poison(67)},
    size=67,
    iterations=16,
    chains=8,
)
add(elementwise.fill, lambda rng: {"y": poison(67)}, size=67, value=-1.5e-6)
add(elementwise.fill, lambda rng: {"y": poison(32768 * 64 + 67)}, size=32768 * 64 + 67, value=3.0)


add(
    columns.take_columns, lambda rng: {"x": normal(rng, 29, 13), "y": poison(29, 5)}, rows=29, cols=13, width=5, first=3
)
add(
    columns.put_columns,
    lambda rng: {"x": normal(rng, 29, 5), "y": normal(rng, 29, 13)},
    rows=29,
    cols=13,
    width=5,
    first=8,
)


add(capped.cap_logits, lambda rng: {"logits": 3 * normal(rng, 67)}, size=67, cap=2.5)
add(
    capped.cap_gradient,
    lambda rng: {
        "x": normal(rng, 67) * (rng.random(67) < 0.7),
        "logits": 2 * np.tanh(normal(rng, 67)),
        "y": poison(67),
    },
    size=67,
    cap=2.5,
)


def drop(rows: int, cols: int, **flags: Any) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        draws = rng.integers(0, 2**32, (rows, 4), np.uint32)
        p = rng.choice([0, 0.1, 0.5, 0.97], rows)  # each row belongs to a slot with a rate of its own
        draws[:, 2], draws[:, 3] = p * 2**32, (1 / (1 - p)).astype(np.float32).view(np.uint32)
        return {"x": normal(rng, rows, cols), "draws": draws, "y": normal(rng, rows, cols)}

    add(elementwise.dropout_apply, make, rows=rows, cols=cols, **flags)


drop(29, 37, module=5, accumulate=True)
drop(7, 64, module=4_000_000_000)


def draws_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    draws = rng.integers(0, 2**32, (rows, 4), np.uint32)
    draws[:, 2], draws[:, 3] = 0.3 * 2**32, np.float32(1 / 0.7).view(np.uint32)
    return draws


def split_up(rng: np.random.Generator) -> Arrays:
    return {"x": normal(rng, 29, 37), "draws": draws_of(rng, 29), "dropped": poison(29, 37), "rest": poison(29, 37)}


def joined_up(rng: np.random.Generator) -> Arrays:
    return {**split_up(rng), "dropped": normal(rng, 29, 37), "rest": normal(rng, 29, 37)}


add(elementwise.dropout_split, split_up, rows=29, cols=37, module=5)
add(elementwise.dropout_join, joined_up, rows=29, cols=37, module=5, accumulate=True)


def rotations(rng: np.random.Generator, rows: int, rotated: int) -> Arrays:
    angle = rng.random((11, max(rotated, 2) // 2)) * 100
    turns = np.stack([np.cos(angle), np.sin(angle)], axis=2).astype(np.float32)
    return {"positions": rng.integers(0, 11, rows, np.uint32), "table": turns}


def rotate(
    rows: int, heads: int, kv_heads: int, dim: int, norm: bool, append: int = 0, rotated: int | None = None
) -> None:
    """Cases of both directions. q, k and v are regions with gaps. append: rows of the caches. rotated: values of a
    head, by default all."""
    turned = dim if rotated is None else rotated
    shape = {"rows": rows, "heads": heads, "kv_heads": kv_heads, "dim": dim, "eps": 1e-3 if norm else 0.0}
    shape["rotated"] = turned
    size, k_first = rows * (heads + 2 * kv_heads) * dim + 11, rows * heads * dim + 3
    shape |= {"q_first": 2, "k_first": k_first, "yq_first": 1 if norm else 2, "yk_first": k_first - norm}

    def some(rng: np.random.Generator, **sizes: int) -> Arrays:
        arrays = {name: normal(rng, size) for name, size in sizes.items()} | rotations(rng, rows, turned)
        return arrays | ({name: normal(rng, dim) for name in ("q_weight", "k_weight")} if norm else {})

    def forward(rng: np.random.Generator) -> Arrays:
        if append:
            cache = append * kv_heads * dim
            return some(rng, x=size, cache_k=cache, cache_v=cache) | {"rows_of": some_rows(rng, rows, append)}
        return some(rng, x=size, **({"y": size} if norm else {}))

    v_first = {"v_first": k_first + rows * kv_heads * dim + 4} if append else {}
    add(rope.rope_forward, forward, **shape, **v_first)
    if not append:
        backward = {"dy": size, "x": size, "dx": size} if norm else {"dy": size}
        add(rope.rope_backward, lambda rng: some(rng, **backward), **shape)


def some_rows(rng: np.random.Generator, rows: int, of: int) -> np.ndarray:
    return np.where(rng.random(rows) < 0.3, NONE, rng.permutation(of)[:rows]).astype(np.uint32)


rotate(13, 3, 2, 10, norm=True)
rotate(13, 3, 2, 10, norm=True, append=17)
rotate(5, 2, 1, 64, norm=False, append=9)
rotate(5, 2, 1, 20, norm=False)
rotate(13, 3, 2, 22, norm=True, rotated=6)
rotate(13, 3, 2, 22, norm=True, append=17, rotated=6)
rotate(5, 2, 1, 20, norm=False, rotated=10)
rotate(5, 2, 1, 20, norm=False, append=9, rotated=0)  # without positions
rotate(13, 0, 2, 10, norm=True)  # k in a storage of its own
rotate(5, 3, 0, 20, norm=False)  # q in a storage of its own


def table(b_type: str, rows: int = 29, cols: int = 7, first: int = 3, count: int = 5, scale: float = 1.0) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        ids = rng.integers(0, first + count + 3, rows, np.uint32)
        return {"ids": ids, "b": random_values(rng, b_type, count, cols), "y": normal(rng, rows, cols)}

    add(embedding.embedding_rows, make, rows=rows, cols=cols, first=first, count=count, b_type=b_type, scale=scale)


add(
    embedding.gather_rows,
    lambda rng: {"x": normal(rng, 41, 7), "rows_of": some_rows(rng, 29, 41), "y": normal(rng, 29, 7)},
    rows=29,
    cols=7,
)
add(
    embedding.scatter_rows,
    lambda rng: {"x": normal(rng, 29, 7), "rows_of": some_rows(rng, 29, 41), "y": normal(rng, 41, 7)},
    rows=29,
    cols=7,
)
add(
    nf4_products.nf4_scales,
    lambda rng: {
        "absmax_codes": rng.integers(0, 256, 768 + 256 + 300, np.uint8),
        "nested": normal(rng, 64 + 64 + 3),
        "dynamic": DYNAMIC_CODE,
        "scales": normal(rng, 576 + 64 + 300),
    },
    blocks=523,
    blocks1=7,
    blocks2=300,
)


def absmax_of(w: np.ndarray) -> np.ndarray:
    return nf4.nf4_absmax(as_float64(w), None, size=w.size).astype(np.float32)


def encode(b_type: str, rows: int, size_in: int, first: int, out: int) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        w = random_values(rng, b_type, rows, size_in)
        w.reshape(-1)[64:128] = 0  # a block of zeros
        codes = rng.integers(0, 2**32, (cdiv(size_in, 8), out), np.uint32)
        return {"w": w, "absmax": absmax_of(w), "codes": codes}

    add(nf4.nf4_encode, make, rows=rows, first=first, out=out, size_in=size_in, b_type=b_type)


for kind, size in (("f32", 64 * 67 + 13), ("bf16", 5), ("f16", 64 * 3 + 1)):
    table(kind, scale=7.25 if kind == "bf16" else 1.0)
    add(
        nf4.nf4_absmax,
        lambda rng, n=size, t=kind: {"w": random_values(rng, t, n), "absmax": poison(cdiv(n, 64))},
        size=size,
        b_type=kind,
    )
encode("f32", rows=64, size_in=13, first=3, out=71)
encode("bf16", rows=7, size_in=64, first=0, out=7)
encode("f16", rows=64, size_in=21, first=64, out=129)
