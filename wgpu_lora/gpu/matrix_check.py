"""Whether a device multiplies subgroup matrices right, as its driver says it does."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from wgpu_lora.gpu.backends import MatrixConfiguration

TEXT = """
const WORDS = (M + N) * K / 4u; // of four f16
@group(0) @binding(0) var<storage, read> halves: array<vec2<u32>>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
var<workgroup> tile: array<vec2<u32>, WORDS>;
var<workgroup> sums: array<f32, M * N>;

@compute @workgroup_size(4u * LANES) @subgroup_size(LANES)
fn main(@builtin(local_invocation_index) local: u32) {
    for (var i = local; i < WORDS; i += 4u * LANES) { tile[i] = halves[i]; }
    workgroupBarrier();
    let left = subgroupMatrixLoad<subgroup_matrix_left<f16, K, M>, row_major>(&tile, 0u, K / 4u);
    let right = subgroupMatrixLoad<subgroup_matrix_right<f16, N, K>, col_major>(&tile, M * K / 4u, K / 4u);
    var sum = subgroup_matrix_result<f32, N, M>();
    sum = subgroupMatrixMultiplyAccumulate(left, right, sum);
    sum = subgroupMatrixMultiplyAccumulate(left, right, sum);
    if (local / LANES == 1u) { subgroupMatrixStore<row_major>(&sums, 0u, sum, N); }
    workgroupBarrier();
    for (var i = local; i < M * N; i += 4u * LANES) { y[i] = sums[i]; }
}
"""


def multiplies_right(device: Any, unit: MatrixConfiguration) -> bool:
    """Whether twice a product of small integers, computed as the family `matrix` does, is exact on a `Device`.

    Raises:
        ShaderError: the driver does not compile it.
    """
    m, n, k = unit.m, unit.n, unit.k
    constants = {"M": m, "N": n, "K": k, "LANES": unit.lanes}
    text = "".join(f"const {name} = {value}u;\n" for name, value in constants.items()) + TEXT
    rng = np.random.default_rng(0)
    left, right = rng.integers(-8, 9, (m, k)), rng.integers(-8, 9, (n, k))
    halves = np.concatenate([left.reshape(-1), right.reshape(-1)]).astype(np.float16)
    pipeline = device.compute_pipeline(("matrix self-test", unit), partial(str, text))
    a, y = (device.create_buffer(size, "matrix self-test") for size in (halves.nbytes, 4 * m * n))
    try:
        device.write(a, halves.view(np.uint32))
        device.run(pipeline, [(a, 0, a.size), (y, 0, y.size)])
        return np.array_equal(device.read(y).view(np.float32), (2 * left @ right.T).reshape(-1))
    finally:
        device.free(a)
        device.free(y)
