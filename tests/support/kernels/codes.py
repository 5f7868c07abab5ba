"""Cases of the products with low-bit codes."""

from __future__ import annotations

from typing import Any

from support.kernels.matmul import adapted, product
from wgpu_lora.weights.lowbit.lowbit_products import codes_matmul, codes_matmul_backward

RARE: dict[str, Any] = {"rare": True}

product(codes_matmul, 37, 131, 96, bias=True, bits=4)
product(codes_matmul, 5, 19, 77, bits=3, group=0)  # words that are not whole
product(codes_matmul, 1, 70, 192, bits=2, group=64)
product(codes_matmul, 3, 34, 16, bits=8, group=16, a_type="bf16")
product(codes_matmul_backward, 19, 160, 37, bits=4, accumulate=True)
product(codes_matmul_backward, 3, 192, 6, bits=8, group=64, accumulate=True)
product(codes_matmul_backward, 3, 67, 20, bits=3, group=0)
product(codes_matmul_backward, 1, 32, 3, bits=2, c_type="f32")
product(codes_matmul, 3, 70, 96, bias=True, stacked=True, gated=True, n1=70, bits=3)
product(codes_matmul_backward, 3, 96, 36, stacked=True, k1=12, k2=40, bits=2)
adapted(codes_matmul, 70, 64, 8, padding=4, h_skip=8, h_first=8, bits=2)

product(codes_matmul, 17, 70, 64, bits=2, accumulate=True, **RARE)
product(codes_matmul, 9, 35, 48, bits=3, group=16, bias=True, **RARE)
product(codes_matmul, 19, 66, 32, bits=8, group=16, **RARE)
product(codes_matmul, 3, 34, 13, bits=8, group=0, a_type="bf16", **RARE)
product(codes_matmul, 2, 5, 20, bits=2, group=0, **RARE)
product(codes_matmul, 9, 67, 13, bits=4, group=0, a_type="f16", a_scale=True, bias=True, **RARE)
product(codes_matmul, 17, 34, 64, bits=4, c_type="f32", **RARE)
product(codes_matmul, 17, 33, 32, bits=2, c_type="f32", **RARE)
product(codes_matmul_backward, 9, 64, 20, bits=2, **RARE)
product(codes_matmul_backward, 17, 48, 22, bits=3, group=16, **RARE)
product(codes_matmul_backward, 9, 67, 21, bits=3, group=0, a_type="f16", a_scale=True, **RARE)
product(codes_matmul_backward, 2, 13, 6, bits=8, group=0, **RARE)
product(codes_matmul_backward, 9, 37, 8, bits=2, group=0, **RARE)
product(codes_matmul_backward, 17, 64, 36, bits=4, c_type="f32", a_type="bf16", **RARE)
product(codes_matmul, 9, 66, 64, bias=True, stacked=True, n1=22, n2=34, bits=3, **RARE)
product(codes_matmul, 3, 7, 13, stacked=True, n1=131, accumulate=True, bits=4, group=0, **RARE)
product(codes_matmul, 3, 70, 96, bias=True, stacked=True, gated=True, n1=70, bits=4, **RARE)
product(codes_matmul, 2, 35, 13, stacked=True, gated=True, n1=35, bits=8, group=0, **RARE)
product(codes_matmul_backward, 9, 96, 36, stacked=True, k1=12, k2=40, bits=4, a_type="bf16", **RARE)
product(codes_matmul_backward, 17, 67, 5, stacked=True, k1=21, bits=3, group=0, **RARE)
product(codes_matmul_backward, 9, 32, 5, stacked=True, k1=20, bits=8, group=16, **RARE)
adapted(codes_matmul, 67, 32, 5, accumulate=True, a_type="f16", a_scale=True, bits=4, **RARE)
adapted(codes_matmul, 66, 32, 5, h_skip=5, n1=66, stacked=True, gated=True, adapted_parts="011", bits=2, **RARE)
adapted(codes_matmul_backward, 64, 36, 12, accumulate=True, bits=4, **RARE)
adapted(codes_matmul_backward, 32, 21, 7, k1=5, stacked=True, bits=8, group=16, **RARE)
