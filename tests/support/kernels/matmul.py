"""Cases of the matrix products, dense, NF4 and LoRA."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.kernels import SLOT_ROWS, SLOTS, Arrays, add, normal, stored, u32, unslotted
from wgpu_lora.gpu.kernel import Kernel, cdiv
from wgpu_lora.ops import matmul
from wgpu_lora.weights import nf4


def product(
    kernel: Kernel,
    m: int,
    n: int,
    k: int,
    *,
    bias: bool = False,
    row_scale: bool = False,
    count: int = 0,
    a_scale: bool = False,
    **flags: Any,
) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        wide_k, wide_n = k + flags.get("a_skip", 0), n + flags.get("y_skip", 0)
        arrays = {"a": stored(rng, flags.get("a_type", "f32"), m, wide_k), "y": normal(rng, m, wide_n)}
        if "codes" in kernel.bindings:  # what lies in the nibbles past the last column must not matter
            out, size_in = (n, k) if kernel is nf4.nf4_matmul else (k, n)
            arrays["codes"] = rng.integers(0, 2**32, (cdiv(size_in, 8), out), np.uint32)
            arrays["scales"] = rng.random(cdiv(out * size_in, 64), np.float32) + 0.5
        else:
            arrays["b"] = stored(rng, flags.get("b_type", "f32"), *((n, k) if kernel is matmul.matmul_nt else (k, n)))
        if bias:
            arrays["bias"] = normal(rng, wide_n)
        if row_scale:
            arrays["row_scale"] = normal(rng, m)
        if a_scale:
            arrays["a_scale"] = normal(rng, m)
        if count:
            arrays["count"] = u32(count)
        return arrays

    spared = (lambda tiles: cdiv(count, tiles["rows"]) * tiles["rows"]) if count else None
    add(kernel, make, spared, m=m, n=n, k=k, **flags)


product(matmul.matmul_nt, 37, 131, 52, bias=True)
product(matmul.matmul_nt, 1, 5, 7, accumulate=True)
product(matmul.matmul_nt, 41, 67, 36, count=9, b_type="bf16")
product(matmul.matmul_nt, 17, 35, 9, bias=True, accumulate=True, b_type="f16")
product(matmul.matmul_nt, 9, 35, 12, bias=True, y_skip=10, y_first=3, b_type="bf16")
product(matmul.matmul_nn, 9, 36, 8, accumulate=True, a_skip=12, a_first=4)
product(matmul.matmul_nn, 41, 131, 52, row_scale=True, count=9)
product(matmul.matmul_nn, 19, 70, 13, accumulate=True, b_type="bf16")
product(matmul.matmul_nn, 3, 2, 5, row_scale=True, b_type="f16")
product(matmul.matmul_nn, 9, 35, 10, b_type="bf16")
product(nf4.nf4_matmul, 37, 131, 128, bias=True)
product(nf4.nf4_matmul, 5, 19, 72, accumulate=True)
product(nf4.nf4_matmul, 9, 67, 13)
product(nf4.nf4_matmul, 2, 5, 20, bias=True, accumulate=True)
product(nf4.nf4_matmul_backward, 19, 136, 37, accumulate=True)
product(nf4.nf4_matmul_backward, 9, 67, 20)
product(nf4.nf4_matmul_backward, 1, 5, 3, accumulate=True)
# spans that end past the contraction, pairs of columns, blocks that never straddle rows
product(nf4.nf4_matmul, 1, 70, 192)
product(nf4.nf4_matmul, 3, 66, 40, bias=True)
product(nf4.nf4_matmul_backward, 17, 128, 38)
product(nf4.nf4_matmul_backward, 2, 64, 6)
product(matmul.matmul_nt, 1, 70, 20, b_type="bf16")
product(matmul.matmul_nn, 18, 70, 12)
# half operands
product(matmul.matmul_nt, 17, 70, 36, a_type="bf16")
product(matmul.matmul_nn, 17, 70, 9, a_type="f16", a_scale=True)
product(nf4.nf4_matmul, 17, 70, 128, a_type="f16", a_scale=True, bias=True)
product(nf4.nf4_matmul, 3, 19, 13, a_type="bf16")
product(nf4.nf4_matmul_backward, 17, 72, 36, a_type="bf16", accumulate=True)
product(nf4.nf4_matmul_backward, 9, 67, 21, a_type="f16", a_scale=True)


def lora(kernel: Kernel, n: int, k: int, padding: int = 0, scale: bool = False, **flags: Any) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        b = normal(rng, 3, n * k + padding)
        arrays = {"a": unslotted(normal(rng, SLOT_ROWS, k)), "b": b, "y": normal(rng, SLOT_ROWS, n), "ranges": SLOTS}
        return {**arrays, "scale": normal(rng, 3)} if scale else arrays

    add(kernel, make, m=SLOT_ROWS, n=n, k=k, slots=3, stride=n * k + padding, **flags)


def lora_gradient(m: int, n: int, padding: int = 0, **flags: Any) -> None:
    def make(rng: np.random.Generator) -> Arrays:
        a, b = unslotted(normal(rng, SLOT_ROWS, m)), unslotted(normal(rng, SLOT_ROWS, n))
        return {"a": a, "b": b, "y": normal(rng, 3, m * n + padding), "ranges": SLOTS}

    add(matmul.lora_tn, make, m=m, n=n, k=SLOT_ROWS, slots=3, stride=m * n + padding, **flags)


lora(matmul.lora_nt, 7, 52, padding=36, scale=True)
lora(matmul.lora_nt, 67, 5, accumulate=True)
lora(matmul.lora_nt, 20, 12, first_row=5)  # the slots' ranges begin before and end after these rows
lora(matmul.lora_nt, 5, 8, padding=3)
lora(matmul.lora_nn, 7, 51, padding=11, scale=True, accumulate=True)
lora(matmul.lora_nn, 67, 8)
lora(matmul.lora_nn, 9, 12, first_row=64)
lora_gradient(20, 67, padding=36)
lora_gradient(7, 9, accumulate=False)
