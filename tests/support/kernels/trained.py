"""Cases of what trains the constants of quantised matrices."""

from __future__ import annotations

import numpy as np

from support.kernels import Arrays, add, normal, poison, u32
from wgpu_lora.gpu.kernel import cdiv
from wgpu_lora.ops.linear.trained_matrix import snap_f16
from wgpu_lora.weights.lowbit.lowbit_layout import constant_count, table_size, word_rows
from wgpu_lora.weights.lowbit.lowbit_training import SLICE, codes_gradient, codes_gradient_sum


def gradient(out: int, size_in: int, columns: int, first: int, bits: int, group: int) -> None:
    sums = table_size(bits) or (0 if group else 1)

    def make(rng: np.random.Generator) -> Arrays:
        count = constant_count(out, size_in, bits, group)
        codes = rng.integers(0, 2**32, (word_rows(size_in, bits), out), np.uint32)
        arrays = {"dw": normal(rng, size_in, columns), "codes": codes}
        arrays |= {"constants": normal(rng, count)} if group and bits < 8 else {}
        arrays |= {"dconstants": normal(rng, count)} if group else {}
        return arrays | ({"partials": poison(cdiv(size_in, SLICE), sums, columns)} if sums else {})

    shape = {"out": out, "size_in": size_in, "columns": columns, "first": first}
    add(codes_gradient, make, **shape, bits=bits, group=group)


gradient(70, 192, 67, 2, bits=2, group=16)
gradient(9, 144, 9, 0, bits=3, group=16)
gradient(35, 256, 20, 13, bits=4, group=64)
gradient(5, 160, 3, 2, bits=8, group=32)
gradient(66, 333, 65, 1, bits=2, group=0)  # words that are not whole
gradient(7, 77, 7, 0, bits=3, group=0)
gradient(6, 141, 5, 1, bits=4, group=0)
gradient(19, 135, 11, 5, bits=8, group=0)
for entry_count, total in ((4, 70), (1, 9)):
    add(
        codes_gradient_sum,
        lambda rng, e=entry_count, n=total: {"partials": normal(rng, 3, e, n - 2), "dconstants": normal(rng, n, e)},
        columns=total - 2,
        first=1,
        slices=3,
        entries=entry_count,
    )


def of_all_sizes(rng: np.random.Generator, enabled: int) -> Arrays:
    """Values of all magnitudes, with ties of two f16, subnormal ones and ones past the largest."""
    x = normal(rng, 400) * 2.0 ** rng.integers(-30, 20, 400)
    x[:8] = [0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25, 65519.9, -65536]
    return {"x": x.astype(np.float32), "enabled": u32(enabled), "y": poison(400)}


for on in (1, 0):
    add(snap_f16, lambda rng, on=on: of_all_sizes(rng, on), note="rounded" if on else "unchanged", size=400)
