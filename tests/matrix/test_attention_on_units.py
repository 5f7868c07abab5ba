"""Attention on matrix units: `make test-matrix` runs these on lavapipe of the newest Mesa."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.kernels import Case
from support.kernels.attention import cases, forked, packed

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.reference_values import as_float64, nmse
from wgpu_lora.gpu.single_kernel import SingleKernel
from wgpu_lora.gpu.tiling import MATRIX
from wgpu_lora.gpu.tiling_check import MATRIX_NMSE

CASES = [
    *cases(packed(70, 1, 33, 11), 115, kv_heads=2, group=3, dim=16),
    *cases(packed(90, window=40), 90, kv_heads=1, group=2, dim=64),
    *cases(forked((30, 60, 5), (9, 1, 20)), 125, kv_heads=1, group=2, dim=128),
    *cases(packed(50, 40), 90, kv_heads=1, group=1, dim=80, cap=0.7),
    *cases(packed(40, 30), 70, kv_heads=1, group=1, dim=256),
]


def outputs(device: Device, case: Case, arrays: dict[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each output in the family `matrix`, and its float64 reference."""
    constants = {**case.kernel.defaults, **case.constants, "compute_dtype": "f16"}
    tiling = case.kernel.tilings(device.capabilities, constants)[0]
    assert tiling.family == MATRIX
    single = SingleKernel(device, case.kernel, arrays, constants, tiling)
    single.run()
    wide = {name: as_float64(arrays[name]) for name in case.kernel.bindings if name in arrays}
    expected = case.kernel(**wide, **constants)
    for name, want in zip(case.kernel.outputs, expected if isinstance(expected, tuple) else (expected,), strict=True):
        yield as_float64(single.read(name)).reshape(arrays[name].shape), np.asarray(want).reshape(arrays[name].shape)
    single.free()


@pytest.mark.parametrize("case", [pytest.param(c, id=c.label) for c in CASES])
def test_attention(units: Device, case: Case) -> None:
    for value, want in outputs(units, case, case.make(np.random.default_rng(0))):
        assert nmse(value.reshape(-1), want.reshape(-1)) < MATRIX_NMSE


@pytest.mark.parametrize("case", [pytest.param(c, id=c.label) for c in CASES[:3]])
@pytest.mark.parametrize("operand", ["k", "v", "q", "dy"])
def test_values_that_are_not_finite_stay_in_their_segment(units: Device, case: Case, operand: str) -> None:
    arrays = case.make(np.random.default_rng(0))
    if operand not in arrays:
        pytest.skip("the forward pass has no gradient")
    expected = [value.copy() for value, _ in outputs(units, case, arrays)]
    arrays[operand][75] = np.nan  # of the rows 71 to 103
    spoilt = [value for value, _ in outputs(units, case, arrays)]
    assert any(np.isnan(value[71:104]).any() for value in spoilt)
    for value, want in zip(spoilt, expected, strict=True):
        rows = np.r_[0:71, 104 : len(value)]
        assert np.array_equal(value[rows], want[rows])
