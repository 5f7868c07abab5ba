"""Choosing and opening a device, and what a kernel's declaration promises about its shader."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.backends.wgpu_native import WgpuNative
from wgpu_lora.gpu.device import WRITE_CHUNK, Device, DeviceOptions
from wgpu_lora.gpu.device_errors import (
    BindingTooLarge,
    GridTooLarge,
    OutOfDeviceMemory,
    ShaderError,
    with_option_advice,
)
from wgpu_lora.gpu.device_list import PREFERENCE, choose, list_devices
from wgpu_lora.gpu.kernel import LINEAR_X, kernel, linear_grid, literal
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.ops.elementwise import add_forward, fill


def test_adapters_are_listed_best_first() -> None:
    devices = list_devices()
    assert devices
    assert [info.index for info in devices] == list(range(len(devices)))
    ranks = [PREFERENCE[info.kind] for info in devices]
    assert ranks == sorted(ranks)
    assert devices[0].as_dict()["limits"]["max-storage-buffers-per-shader-stage"] >= 8
    assert list_devices() == devices


def test_an_adapter_is_chosen_by_number_name_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = list_devices()
    for info in devices:
        assert choose(info.index)[0] == info
        assert choose(str(info.index))[0] == info
    assert choose(devices[-1].name.upper())[0].name == devices[-1].name
    monkeypatch.delenv("WGPU_LORA_DEVICE", raising=False)
    assert choose(None)[0] == devices[0]
    monkeypatch.setenv("WGPU_LORA_DEVICE", str(devices[-1].index))
    assert choose(None)[0] == devices[-1]
    assert choose(0)[0] == devices[0]


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("99", r"no device 99: choose 0 to \d+, as 'wgpu-lora info'"),
        (-1, r"no device -1: choose 0 to \d+, as 'wgpu-lora info'"),
        ("abacus", r"No device is named 'abacus': choose one of 0 \("),
    ],
)
def test_a_device_that_is_not_there(selector: int | str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose(selector)


def test_no_adapter_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WgpuNative, "adapters", lambda self: [])
    with pytest.raises(UserError, match="install your GPU's Vulkan driver"):
        Device()


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_SUBGROUPS", "DEFAULT_LIMITS", "CHECKED"):
        monkeypatch.delenv(f"WGPU_LORA_{name}", raising=False)
    assert DeviceOptions.from_environment() == DeviceOptions()
    monkeypatch.setenv("WGPU_LORA_NO_SUBGROUPS", "1")
    monkeypatch.setenv("WGPU_LORA_CHECKED", "0")
    assert DeviceOptions.from_environment() == DeviceOptions(subgroups=False)


def test_a_device_without_subgroups_or_larger_limits() -> None:
    device = Device(options=DeviceOptions(subgroups=False, default_limits=True))
    assert device.capabilities.subgroup_size == 0
    assert "subgroup" not in device.features
    assert device.capabilities.workgroup_bytes == 16384
    assert device.max_binding == 128 << 20  # WebGPU's default


@pytest.mark.drivers
def test_what_was_measured(device: Device) -> None:
    assert device.capabilities.subgroup_size in (0, 4, 8, 16, 32, 64)
    assert device.max_binding % 256 == 0
    assert device.max_buffer >= device.max_binding >= 128 << 20


def test_a_device_that_does_not_compile_subgroups_has_none(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ShaderError("subgroup_probe", "unknown builtin")

    monkeypatch.setattr(Device, "compute_pipeline", fails)
    before = device.allocated
    assert device._subgroup_size() == (device.options.subgroup_size or 0)
    assert device.allocated == before


@pytest.mark.drivers
def test_writing_and_reading_back(device: Device, rng: np.random.Generator) -> None:
    before = device.allocated
    data = rng.integers(0, 256, WRITE_CHUNK + 1003, np.uint8)  # more than one write, and not whole words
    buffer = device.create_buffer(data.nbytes + 256)
    device.write(buffer, data, offset=256)
    np.testing.assert_array_equal(device.read(buffer, data.nbytes, offset=256), data)
    assert not device.read(buffer, 256).any()  # buffers begin zeroed
    assert device.allocated - before == buffer.size
    device.free(buffer)
    assert device.allocated == before


def test_a_buffer_too_large_is_a_user_error(device: Device) -> None:
    before = device.allocated
    with pytest.raises(OutOfDeviceMemory, match=r"could not allocate .* bytes for the logits") as refused:
        device.create_buffer(1 << 60, "the logits")
    assert (refused.value.name, refused.value.nbytes, refused.value.in_use) == ("the logits", 1 << 60, before)
    assert device.allocated == before


def test_advice_about_options_comes_from_callers() -> None:
    with (
        pytest.raises(GridTooLarge) as refused,
        with_option_advice("max_length"),
        with_option_advice("lora_r", "max_length"),
    ):
        raise GridTooLarge("fill", (1, 70000, 1))
    assert str(refused.value) == (
        "fill would need a grid of (1, 70000, 1), more than WebGPU's 65535: lower lora_r or max_length."
    )
    advice = r"in use\): lower max_length, or choose a smaller model\.$"
    with pytest.raises(OutOfDeviceMemory, match=advice), with_option_advice("max_length"):
        raise OutOfDeviceMemory("x", 1, 0)
    with pytest.raises(BindingTooLarge, match=r"at most 1: choose a smaller model\.$"), with_option_advice():
        raise BindingTooLarge("x", 2, 1)


def test_a_shader_that_does_not_compile_is_named(device: Device) -> None:
    with pytest.raises(ShaderError, match="odd does not compile"):
        device.compute_pipeline(("odd",), lambda: "fn main() -> { }")


# -- declarations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bindings",
    [
        {"a": "in", "b": "in", "z": "out"},  # another name
        {"b": "in", "a": "in", "y": "out"},  # another order
        {"a": "fixed", "b": "in", "y": "out"},  # another access
        {"a": "in", "b": "in", "y": "out", "more": "in"},
        {"a": "in", "b": "in"},
    ],
)
def test_a_signature_unlike_its_shader_is_refused(bindings: dict[str, str]) -> None:
    declared = replace(add_forward, bindings=bindings)
    with pytest.raises(TypeError, match=r"add.wgsl declares the bindings .* but the signature of add_forward has"):
        declared.source(tuple(bindings), {"size": 8}, Tiling())


def test_a_name_is_declared_once() -> None:
    with pytest.raises(AssertionError, match="two kernels are named fill"):
        kernel("fill.wgsl", grid=lambda c: (1, 1, 1))(fill.reference)


def test_constants_take_the_place_of_defaults() -> None:
    text = fill.source(("y",), {"size": 7, "value": 1e-8}, Tiling())
    assert "const SIZE: u32 = 7u;" in text
    assert f"const VALUE: f32 = {literal('f32', 1e-8)};" in text


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-6, 3.4e38, 1 / 3, 1e-38])
def test_float_literals_are_read_back_as_they_are(value: float) -> None:
    assert literal("f32", value).endswith("f")
    assert np.float32(literal("f32", value)[:-1]) == np.float32(value)


@pytest.mark.parametrize("items", [0, 1, 64, 65, LINEAR_X * 64, LINEAR_X * 64 + 1, LINEAR_X * 64 * 5])
def test_linear_grids_hold_every_item(items: int) -> None:
    x, y, z = linear_grid(items)
    assert x * y * z * 64 >= items
    assert max(x, y, z) <= 65535
