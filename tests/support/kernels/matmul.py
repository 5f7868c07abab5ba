"""Cases of the matrix products, dense, NF4 and LoRA."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.kernels import SLOT_ROWS, SLOTS, Arrays, add, synthetic, u32, unslotted
from wgpu_lora.gpu.kernel import Kernel, cdiv
from wgpu_lora.ops.matmul import matmul
from wgpu_lora.ops.matmul.matmul_tuning import block
from wgpu_lora.ops.matmul.matrix_stack import factor_region
from wgpu_lora.weights.nf4 import nf4_products


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
    rare: bool = False,
    slow: bool = False,
    **flags: Any,
) -> None:
    shape = {"m": m, "n": n, "k": k, **flags}
    optional = {"bias": bias, "row_scale": row_scale, "count": count, "a_scale": a_scale}

    def make(rng: np.random.Generator) -> Arrays:
        arrays = synthetic(kernel, rng, shape, *(name for name, there in optional.items() if not there))
        return {**arrays, "count": u32(count)} if count else arrays

    spared = (lambda tiling: cdiv(count, block(tiling)[0]) * block(tiling)[0]) if count else None
    add(kernel, make, spared, rare=rare, slow=slow, **shape)


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
product(nf4_products.nf4_matmul, 37, 131, 128, bias=True)
product(nf4_products.nf4_matmul, 5, 19, 72, accumulate=True)
product(nf4_products.nf4_matmul, 9, 67, 13)
product(nf4_products.nf4_matmul, 2, 5, 20, bias=True, accumulate=True)
product(nf4_products.nf4_matmul_backward, 19, 136, 37, accumulate=True)
product(nf4_products.nf4_matmul_backward, 9, 67, 20)
product(nf4_products.nf4_matmul_backward, 1, 5, 3, accumulate=True)
# spans that end past the contraction, pairs of columns, blocks that never straddle rows
product(nf4_products.nf4_matmul, 1, 70, 192)
product(nf4_products.nf4_matmul, 3, 66, 40, bias=True)
product(nf4_products.nf4_matmul_backward, 17, 128, 38)
product(nf4_products.nf4_matmul_backward, 2, 64, 6)
product(matmul.matmul_nt, 1, 70, 20, b_type="bf16")
product(matmul.matmul_nn, 18, 70, 12)
# half operands
product(matmul.matmul_nt, 17, 70, 36, a_type="bf16")
product(matmul.matmul_nn, 17, 70, 9, a_type="f16", a_scale=True)
product(nf4_products.nf4_matmul, 17, 70, 128, a_type="f16", a_scale=True, bias=True)
product(nf4_products.nf4_matmul, 3, 19, 13, a_type="bf16")
product(nf4_products.nf4_matmul_backward, 17, 72, 36, a_type="bf16", accumulate=True)
product(nf4_products.nf4_matmul_backward, 9, 67, 21, a_type="f16", a_scale=True)


def adapted(
    kernel: Kernel, n: int, k: int, rank: int, padding: int = 0, a_scale: bool = False, rare: bool = False, **flags: Any
) -> None:
    """A product with LoRA's second product inside, of three slots, one of them without rows."""
    shape = {"m": SLOT_ROWS, "n": n, "k": k, "rank": rank, **flags}
    widths = [shape[name] for name in ("n", "n1", "n2") if shape.get(name)]
    regions = [factor_region(width * rank) for width in widths]
    shape["stride"] = (sum(regions) if len(widths) > 1 else n * rank) + padding

    def make(rng: np.random.Generator) -> Arrays:
        # a bias and scales of a's rows would be nine bindings: see `FrozenProduct.adds`
        arrays = synthetic(kernel, rng, shape, "row_scale", "count", "bias" if a_scale else "a_scale")
        factor = rng.standard_normal((3, shape["stride"]), np.float32)
        return {**arrays, "h": unslotted(arrays["h"]), "factor": factor, "ranges": SLOTS}

    add(kernel, make, rare=rare, **shape)


def lora(kernel: Kernel, n: int, k: int, padding: int = 0, scale: bool = False, **flags: Any) -> None:
    shape = {"m": SLOT_ROWS, "n": n, "k": k, "slots": 3, "stride": n * k + padding, **flags}

    def make(rng: np.random.Generator) -> Arrays:
        arrays = synthetic(kernel, rng, shape, *([] if scale else ["scale"]))
        return {**arrays, "a": unslotted(arrays["a"]), "ranges": SLOTS}

    add(kernel, make, **shape)


def lora_gradient(m: int, n: int, padding: int = 0, **flags: Any) -> None:
    shape = {"m": m, "n": n, "k": SLOT_ROWS, "slots": 3, "stride": m * n + padding, **flags}

    def make(rng: np.random.Generator) -> Arrays:
        arrays = synthetic(matmul.lora_tn, rng, shape)
        return {**arrays, "a": unslotted(arrays["a"]), "b": unslotted(arrays["b"]), "ranges": SLOTS}

    add(matmul.lora_tn, make, **shape)


# stacks
product(nf4_products.nf4_matmul, 9, 66, 64, bias=True, stacked=True, n1=22, n2=34)
product(nf4_products.nf4_matmul, 3, 7, 13, stacked=True, n1=131, accumulate=True)
product(nf4_products.nf4_matmul_backward, 9, 72, 36, stacked=True, k1=12, k2=40, a_type="bf16")
product(nf4_products.nf4_matmul_backward, 17, 67, 5, stacked=True, k1=21)
product(matmul.matmul_nt, 9, 35, 12, bias=True, stacked=True, n1=5, n2=66, b_type="bf16")
product(matmul.matmul_nn, 9, 70, 8, stacked=True, k1=20, k2=4, accumulate=True)
product(nf4_products.nf4_matmul, 3, 70, 72, bias=True, stacked=True, gated=True, n1=70)
product(matmul.matmul_nt, 2, 35, 12, stacked=True, gated=True, n1=35, b_type="bf16")
adapted(nf4_products.nf4_matmul, 66, 40, 5, h_skip=5, n1=66, stacked=True, gated=True, adapted_parts="011")
adapted(nf4_products.nf4_matmul, 70, 64, 8, h_skip=16, n1=66, n2=20, stacked=True)
adapted(nf4_products.nf4_matmul, 37, 40, 5, h_skip=5, n1=9, n2=20, stacked=True, adapted_parts="101", accumulate=True)
adapted(nf4_products.nf4_matmul_backward, 72, 36, 12, k1=64, k2=8, stacked=True)
adapted(matmul.matmul_nt, 70, 12, 4, h_skip=4, n1=12, stacked=True, adapted_parts="011", n2=8, b_type="f16")
adapted(matmul.matmul_nn, 67, 9, 6, k1=5, stacked=True, b_type="bf16")
adapted(nf4_products.nf4_matmul, 70, 64, 8, padding=4, h_skip=8, h_first=8)
adapted(nf4_products.nf4_matmul, 67, 40, 5, accumulate=True, a_type="f16", a_scale=True)
adapted(nf4_products.nf4_matmul_backward, 72, 36, 12, accumulate=True)
adapted(nf4_products.nf4_matmul_backward, 67, 21, 7, padding=3, first_row=5)
adapted(matmul.matmul_nt, 35, 9, 4, y_skip=10, y_first=3, b_type="bf16")
adapted(matmul.matmul_nn, 70, 52, 8, b_type="bf16", a_skip=12, a_first=4)
lora(matmul.lora_nt, 7, 52, padding=36, scale=True)
lora(matmul.lora_nt, 67, 5, accumulate=True)
lora(matmul.lora_nt, 20, 12, first_row=5)  # the slots' ranges begin before and end after these rows
lora(matmul.lora_nt, 5, 8, padding=3)
lora(matmul.lora_nn, 7, 51, padding=11, scale=True, accumulate=True)
lora(matmul.lora_nn, 67, 8)
lora(matmul.lora_nn, 9, 12, first_row=64)
lora(matmul.lora_nn, 8, 36, scale=True, y_skip=16, y_first=8)
lora_gradient(20, 67, padding=36)
lora_gradient(20, 8, b_skip=8, b_first=4)
lora_gradient(8, 72, a_skip=12, a_first=8)
lora_gradient(7, 9, accumulate=False)
