"""Cases of the probes that measure a device's ceilings."""

from __future__ import annotations

from support.kernels import add, normal, poison
from wgpu_lora.bench import device_ceilings

add(
    device_ceilings.fma_chains, lambda rng: {"x": normal(rng, 67) / 8, "y": poison(67)}, size=67, iterations=4, chains=3
)
add(device_ceilings.stream_copy, lambda rng: {"x": normal(rng, 2152), "y": poison(2152)}, size=2152)
add(device_ceilings.decode_fma, lambda rng: {"x": normal(rng, 67), "y": poison(67)}, size=67, iterations=3, chains=2)
