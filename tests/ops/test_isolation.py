"""A segment's bad numbers stay in it, though its rows share subgroups with others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.single_kernel import SingleKernel
from wgpu_lora.gpu.tiling import WORKGROUP
from wgpu_lora.ops.attention.attention import attention_backward_kv, attention_backward_q, attention_forward

ROWS, CUT, DIM = 10, 5, 8  # two segments in what is one subgroup or tile nearly everywhere
SHAPE = {"rows": ROWS, "kv_heads": 1, "group": 1, "dim": DIM, "scale": 0.3}


@pytest.mark.drivers
@pytest.mark.parametrize(
    "family", ["broadcast", "spread", pytest.param(WORKGROUP, marks=pytest.mark.slow), "plain"]
)  # CPU drivers are slow to compile `workgroup`
@pytest.mark.parametrize(
    "kernel", [attention_forward, attention_backward_q, attention_backward_kv], ids=lambda k: k.name
)
def test_a_nan_stays_in_its_segment(device: Device, kernel: Kernel, family: str) -> None:
    rng = np.random.default_rng(0)
    start = np.where(np.arange(ROWS) < CUT, 0, CUT)
    stop = np.where(np.arange(ROWS) < CUT, CUT, ROWS)
    ranges = np.stack([start, np.arange(ROWS) + 1, stop, np.arange(ROWS)], axis=1).astype(np.uint32)
    arrays = {
        name: rng.standard_normal((ROWS, DIM)).astype(np.float32)
        for name in ("q", "k", "v", "dy", "y", "dq", "dk", "dv")
    }
    arrays |= {"lse": np.zeros(ROWS, np.float32), "stats": rng.random((ROWS, 4), np.float32), "ranges": ranges}
    constants = SHAPE | ({} if kernel is attention_backward_kv else {"keys": ROWS})

    offered = [
        tiling
        for software in (True, False)
        for registers in (64, 128)  # few, so that they compile quickly
        for tiling in kernel.tilings(replace(device.capabilities, software=software, registers=registers), constants)
    ]
    of_family = [tiling for tiling in offered if tiling.family == family]
    if not of_family:
        pytest.skip("the device has no subgroups")
    tiling = of_family[-1 if family == WORKGROUP else 0]

    def outputs(*poisoned: str) -> list[np.ndarray]:
        values = {name: arrays[name].copy() for name in kernel.bindings if name in arrays}
        for name in poisoned:
            values[name][CUT:] = np.nan
        single = SingleKernel(device, kernel, values, constants, tiling)
        single.run()
        results = single.outputs()
        single.free()
        return results

    clean = outputs()
    for name in [name for name in kernel.bindings if name in ("q", "k", "v", "dy")]:
        for before, after in zip(clean, outputs(name), strict=True):
            np.testing.assert_array_equal(before[:CUT], after[:CUT])
        assert any(np.isnan(after[CUT:]).all() for after in outputs(name)), f"the NaN in {name} is lost"


@pytest.mark.drivers
@pytest.mark.parametrize("cache_dtype", ["f32", "f16"])
@pytest.mark.parametrize(
    ("software", "decoding", "lanes"),
    [(True, True, None), (True, False, None), (False, True, None), (False, False, None), (False, False, 0)],
)
@pytest.mark.parametrize("dim", [8, 72])
def test_a_cache_in_blocks_keeps_sequences_apart(
    device: Device, cache_dtype: str, software: bool, decoding: bool, lanes: int | None, dim: int
) -> None:
    """Three sequences of 5, 33 and 1 tokens in blocks that are mixed, of which the second is full of NaNs."""
    rng, block, heads, group = np.random.default_rng(0), 16, 2, 3
    blocks = np.array([7, 2, 9, 4, 1], np.uint32)  # one, three and one
    kinds = {"f32": np.float32, "f16": np.float16}
    q = rng.standard_normal((6, heads * group, dim)).astype(np.float32)
    k, v = (rng.standard_normal((10 * block, heads, dim)).astype(kinds[cache_dtype]) for _ in "kv")
    # Two rows at the end of the first, three of the second, and one of the third.
    ranges = np.array([[0, 4], [0, 5], [16, 47], [16, 48], [16, 49], [64, 65]], np.uint32)
    ranges = np.concatenate([ranges, np.zeros((6, 2), np.uint32)], axis=1)
    shape = {"rows": 6, "keys": block * 5, "kv_heads": heads, "group": group, "dim": dim, "scale": dim**-0.5}
    constants = {**attention_forward.defaults, **shape, "block": block, "cache_dtype": cache_dtype}
    capabilities = replace(device.capabilities, software=software, decoding=decoding)
    if lanes is not None:
        capabilities = replace(capabilities, subgroup_size=lanes)

    def outputs(k: np.ndarray, v: np.ndarray) -> np.ndarray:
        arrays = {"q": q, "k": k, "v": v, "ranges": ranges, "y": np.zeros_like(q)}
        arrays |= {"lse": np.zeros((6, heads * group), np.float32), "blocks": blocks}
        tiling = attention_forward.tilings(capabilities, constants)[0]
        single = SingleKernel(device, attention_forward, arrays, constants, tiling)
        single.run()
        values = single.read("y").copy()
        single.free()
        return values.reshape(q.shape)

    actual = outputs(k, v)
    wide = [array.astype(np.float64) for array in (q, k, v)]
    want, _ = attention_forward(*wide, ranges, None, None, blocks, **constants)
    np.testing.assert_allclose(actual, want.reshape(q.shape), atol=2e-6)
    for array in (k, v):
        for number in blocks[1:4]:
            array[number * block : (number + 1) * block] = np.nan
    spoilt = outputs(k, v)
    np.testing.assert_array_equal(spoilt[[0, 1, 5]], actual[[0, 1, 5]])
    assert np.isnan(spoilt[2:5]).all()
