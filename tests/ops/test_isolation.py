"""A segment's bad numbers stay in it, though its rows share subgroups with others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.single_kernel import SingleKernel
from wgpu_lora.gpu.tiling import WORKGROUP
from wgpu_lora.ops.attention import attention_backward_kv, attention_backward_q, attention_forward

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
        found = single.outputs()
        single.free()
        return found

    clean = outputs()
    for name in [name for name in kernel.bindings if name in ("q", "k", "v", "dy")]:
        for before, after in zip(clean, outputs(name), strict=True):
            np.testing.assert_array_equal(before[:CUT], after[:CUT])
        assert any(np.isnan(after[CUT:]).all() for after in outputs(name)), f"the NaN in {name} is lost"
