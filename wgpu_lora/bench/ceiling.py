"""What the device can do at best: independent chains of fused multiply-adds in registers."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import U32, In, Out, kernel, one_per
from wgpu_lora.gpu.single import SingleKernel


@kernel("fma_chains.wgsl.j2", grid=lambda c: one_per(c.size), lib=("linear",))
def fma_chains(x: In, y: Out, *, size: U32, iterations: U32, chains: U32 = 12, unroll: U32 = 4) -> Any:
    """y = the sum of chains c_j = c_j c_(j+1) + x / 4, begun at x j / chains; the last one's neighbour is the first."""
    value = x[:, None] * np.arange(chains) / chains
    for _ in range(iterations):
        value = value * np.roll(value, -1, axis=1) + 0.25 * x[:, None]
    return value.sum(axis=1)


def fma_gflops(device: Device, size: int = 1 << 14, iterations: int = 4096) -> float:
    """The best GFLOP/s of the chains over a few counts and unrollings: the ceiling of f32 kernels."""
    best = 0.0
    for chains, unroll in ((10, 32), (12, 16), (12, 32), (12, 64), (13, 64)):
        x = np.full(size, 0.5, np.float32)
        constants = {"size": size, "iterations": iterations, "chains": chains, "unroll": unroll}
        single = SingleKernel(device, fma_chains, {"x": x, "y": np.zeros_like(x)}, constants, {})
        best = max(best, 2 * size * iterations * chains / single.seconds(5) / 1e9)
        single.free()
    return best
