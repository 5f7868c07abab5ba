"""What the device fits, beside the NumPy reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import allocate, release
from wgpu_lora.weights.base import Loading, Shared
from wgpu_lora.weights.base_formats import base_format
from wgpu_lora.weights.lowbit import lowbit_packing
from wgpu_lora.weights.lowbit.kmeans_kernels import lut_lloyd
from wgpu_lora.weights.lowbit.kmeans_reference import fit
from wgpu_lora.weights.lowbit.lowbit import LowBitWeight, quantised
from wgpu_lora.weights.lowbit.lowbit_layout import decode, unpack


@dataclass
class Source:
    """A matrix as the part of a checkpoint that is loaded."""

    w: np.ndarray

    def dtype(self, name: str) -> str:
        return "F32"

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        return self.w[row_start:row_stop]

    read_f32 = read_raw

    def packed(self, name: str) -> None:
        return None


def fitted(device: Device, w: np.ndarray, scheme: str, importance: np.ndarray | None = None) -> tuple[Any, ...]:
    """(codes, table, scales) of w as the device fits them."""
    out, size_in = w.shape
    weight = base_format(scheme).declare((out, size_in), "w", Shared(device.max_binding))
    assert isinstance(weight, LowBitWeight)
    before = device.allocated
    allocate(device, set(weight.storages()))
    try:
        with Loading(device, [weight], {} if importance is None else {"w": importance}) as loading:
            weight.load(loading, Source(w), "w")
        packed, *constants = weight._read(device)
        return unpack(packed, size_in, weight.scheme.bits), *constants
    finally:
        release(device, weight.storages())
        assert device.allocated == before


def error(w: np.ndarray, found: tuple[Any, ...], bits: int, importance: Any = 1.0) -> float:
    return float((importance * (decode(*found, bits) - w) ** 2).sum())


def heavy(rng: np.random.Generator, out: int, size_in: int) -> np.ndarray:
    """Values with outliers in a few inputs, as the weights of models have them."""
    w = 0.02 * rng.standard_normal((out, size_in), np.float32)
    w[:, :: size_in // 3] *= 12
    return w


@pytest.mark.parametrize(
    ("scheme", "bits"), [("lut2-row", 2), ("lut2-g16", 2), pytest.param("lut4-g32", 4, marks=pytest.mark.slow)]
)
def test_a_fit_is_at_least_as_good_as_the_reference(
    device: Device, rng: np.random.Generator, scheme: str, bits: int
) -> None:
    w, importance = heavy(rng, 40, 256), np.exp(rng.standard_normal(256)).astype(np.float32)
    found = fitted(device, w, scheme, importance)
    of = base_format(scheme).scheme  # type: ignore[attr-defined]
    reference = fit(w, bits, of.group, importance)
    assert error(w, found, bits, importance) < 1.01 * error(w, reference, bits, importance)
    assert error(w, found, bits, importance) < error(w, fitted(device, w, scheme), bits, importance)


def test_codes_are_the_nearest_to_the_rounded_table_and_scales(device: Device, rng: np.random.Generator) -> None:
    w = heavy(rng, 24, 128)
    codes, table, scales = fitted(device, w, "lut2-g16")
    x = w / np.repeat(scales.T.astype(np.float64), 16, axis=1)
    nearest = np.abs(x[:, :, None] - table[:, None].astype(np.float64)).argmin(axis=2)
    assert (codes == nearest).mean() > 0.9995  # some are as near to f32
    assert (np.diff(table.astype(np.float64), axis=1) >= 0).all()


@pytest.mark.parametrize("scheme", ["int8", "int8-row"])
def test_eight_bits_are_the_reference(device: Device, rng: np.random.Generator, scheme: str) -> None:
    w = heavy(rng, 24, 96)
    codes, _, scales = fitted(device, w, scheme)
    expected, _, want = quantised(w, base_format(scheme).scheme)  # type: ignore[attr-defined]
    np.testing.assert_allclose(scales.astype(np.float64), want.astype(np.float64), rtol=2**-10)
    assert np.abs(codes.astype(int) - expected).max() <= 1


def test_pieces_and_rows_do_not_depend_on_each_other(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = heavy(rng, 21, 64)
    whole = fitted(device, w, "lut2-g16")
    monkeypatch.setattr(lowbit_packing, "PIECE_BYTES", 4 * 64 * 8)
    for got, want in zip(fitted(device, w, "lut2-g16"), whole, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("scheme", ["lut2-row", "lut2-g16", "int8"])
def test_groups_of_zeros_stay_zeros(device: Device, rng: np.random.Generator, scheme: str) -> None:
    w = heavy(rng, 8, 64)
    w[3], w[5, :32], w[6] = 0, 0, 0.25
    found = decode(*fitted(device, w, scheme), base_format(scheme).scheme.bits)  # type: ignore[attr-defined]
    assert np.abs(found[3]).max() < 1e-6
    np.testing.assert_allclose(found[6], 0.25, rtol=2e-3)
    if not scheme.endswith("row"):
        assert np.abs(found[5, :32]).max() < 1e-6


def test_values_that_f16_cannot_hold_are_refused(device: Device) -> None:
    with pytest.raises(UserError, match=r"^w has values that f16 cannot hold: quantise this model to nf4 instead\.$"):
        fitted(device, np.full((4, 32), 1e6, np.float32), "lut2-row")


def test_values_that_are_not_finite_are_left_to_the_audit(device: Device, rng: np.random.Generator) -> None:
    w = heavy(rng, 4, 32)
    w[1, 3], w[2, 5] = np.nan, np.inf
    codes, *_ = fitted(device, w, "lut2-row")
    assert codes.shape == w.shape


def test_references_leave_out_what_rounding_decides() -> None:
    """Values on the threshold between two centres, of one row or of all."""
    c: dict[str, Any] = {"rows": 2, "size_in": 4, "group": 0, "bits": 2}
    table = np.array([[-2.0, -1, 1, 2], [-2, -1, 1, 2]])
    w = np.array([[-2.0, -1, 1, 2], [-2, 0, 1, 2]])
    found = lut_lloyd(w, table, iterations=1, **c)
    np.testing.assert_array_equal(np.isnan(found), [[False] * 4, [True] * 4])
    assert lut_lloyd(np.zeros((2, 4)), table, iterations=1, **c) is None
