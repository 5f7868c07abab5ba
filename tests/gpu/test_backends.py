"""WebGPU implementations: which one is chosen, and wgpu-native's declarations."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import cffi
import pytest
from support.cli import Run

from wgpu_lora.errors import DeviceWarning, UserError
from wgpu_lora.gpu import device, device_list
from wgpu_lora.gpu.backends import AUTO, DAWN, ENVIRONMENT, WGPU, MatrixConfiguration, backend, installed
from wgpu_lora.gpu.backends.wgpu_native import declare_only_used_types
from wgpu_lora.gpu.device import Device, DeviceOptions
from wgpu_lora.gpu.device_errors import DeviceLost, raise_device_lost
from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.gpu.tiling import Capabilities, Tiling
from wgpu_lora.ops.matmul import matmul_tuning
from wgpu_lora.train.run.training_log import environment

HEADER = """
typedef unsigned int Flags;
typedef enum Kind { Kind_A = 0, Kind_B = 1 } Kind;
typedef struct Chained { struct Chained *next; Kind kind; } Chained;
typedef void (*Callback)(Kind kind, Chained const *chained, Flags flags);
"""
DECLARATIONS = ["Flags", "Chained *", "Chained * ", "Chained[3]", "Kind", "Callback", "char []", "struct Chained *",
                "void (*)(Kind, Chained *, void *)", "struct New *"]  # fmt: skip


def test_types_are_the_same() -> None:
    plain, quick = cffi.FFI(), cffi.FFI()
    for ffi in (plain, quick):
        ffi.cdef(HEADER)
    declare_only_used_types(quick)
    shapes = [[str(ffi.typeof(text)) for text in DECLARATIONS] for ffi in (plain, quick)]
    assert shapes[0] == shapes[1]
    assert quick.typeof("struct New *") is quick.typeof("struct New  *")
    with pytest.raises(cffi.CDefError):
        quick.typeof("Unknown")


def test_another_cffi_is_left_as_it_is() -> None:
    declare_only_used_types(object())


def test_a_backend_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Device(options=DeviceOptions(backend=WGPU)).webgpu.versions().keys() == {"wgpu-native"}
    monkeypatch.setenv(ENVIRONMENT, DAWN)
    if installed(DAWN):
        opened = Device()
        assert opened.webgpu.versions().keys() == {"wgpudawn"}
        assert environment(opened).versions["wgpudawn"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"dawn is not installed: install it with .* or choose wgpu"):
        Device()
    monkeypatch.setenv(ENVIRONMENT, "metal")
    with pytest.raises(UserError, match="no backend 'metal': choose one of auto, wgpu, dawn"):
        Device()


def test_a_backend_of_a_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, AUTO)
    assert "no backend 'metal': choose one of auto" in run("info", "--backend", "metal").refusal()
    if installed(DAWN):
        report = json.loads(run("info", "--backend", "dawn", "--json").out)
        assert report["webgpu"].keys() == {"wgpudawn"}
        assert os.environ[ENVIRONMENT] == DAWN  # for the processes that a command starts


UNIT = MatrixConfiguration(16, 16, 16, "f16", "f32", lanes=32)


@pytest.mark.parametrize(("kind", "matrices", "expected"), [
    ("discrete", (UNIT,), DAWN), ("discrete", (), WGPU), ("software", (UNIT,), WGPU),
])  # fmt: skip
def test_auto_takes_dawn_for_matrix_units_of_a_gpu(
    kind: str, matrices: tuple[MatrixConfiguration, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(index: int, adapter: str, webgpu: Any) -> DeviceInfo:
        return DeviceInfo(index, adapter, "", 1, "Vulkan", kind, (), {}, 2, matrices if webgpu.name == DAWN else ())

    listed = {WGPU: ["another", "gpu", "gpu"], DAWN: ["gpu", "gpu", "another"]}
    monkeypatch.setattr(device_list, "installed", lambda name: True)
    monkeypatch.setattr(device_list, "backend", lambda name=None: SimpleNamespace(name=DAWN if name == DAWN else WGPU))
    monkeypatch.setattr(device_list, "_sorted_adapters", lambda webgpu: listed[webgpu.name])
    monkeypatch.setattr(device_list, "describe", describe)
    webgpu, info, adapter = device_list.choose_backend(2, AUTO)
    assert (webgpu.name, info.index, adapter) == (expected, 1 if expected == DAWN else 2, "gpu")


def test_matrix_units_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "_multiplies_right", lambda self, unit: False)
    listed = replace(device_list.list_devices()[0], matrices=(UNIT,))
    real = device_list.choose(None)
    monkeypatch.setattr(device, "choose_backend", lambda selector, name: (backend(WGPU), listed, real[1]))
    with pytest.warns(DeviceWarning, match=r"matrix units of .* are not used: their products are wrong"):
        named = Device(options=DeviceOptions(backend=DAWN))
    assert (named.info.matrices, named.capabilities.matrix) == ((UNIT,), None)
    with pytest.warns(DeviceWarning):
        assert Device(options=DeviceOptions(backend=AUTO)).info.matrices == (), "auto takes wgpu-native then"


@pytest.mark.parametrize("message", ["Parent device is lost", "[Device] is lost.\n - While calling CreateBuffer"])
def test_a_lost_device_as_each_backend_words_it(message: str) -> None:
    with pytest.raises(DeviceLost, match="gpu was lost"), raise_device_lost("gpu"):
        raise RuntimeError(message)


def test_tilings_of_matrix_units() -> None:
    capabilities = Capabilities(32, f16=True, workgroup_bytes=65536, matrix=UNIT)
    call = SimpleNamespace(form="nt", m=512, n=512, k=512, a_type="f16")
    tilings = matmul_tuning.on_matrix_units(capabilities, call)
    assert [(tiling.rows * tiling.height, tiling.cols * tiling.width) for tiling in tilings] == [
        (128, 128),
        (128, 64),
        (64, 64),
    ]
    many = matmul_tuning.on_matrix_units(replace(capabilities, threads=512), call)
    assert [many[0].lanes, many[0].rows * many[0].height, many[1:]] == [512, 256, tilings]
    assert not matmul_tuning.on_matrix_units(replace(capabilities, matrix=None), call)
    assert not matmul_tuning.on_matrix_units(capabilities, SimpleNamespace(**{**vars(call), "a_type": "f32"}))
    assert not matmul_tuning.on_matrix_units(capabilities, SimpleNamespace(**{**vars(call), "m": 1}))
    small = matmul_tuning.on_matrix_units(replace(capabilities, workgroup_bytes=16384), call)
    assert [tiling.lanes for tiling in small] == [256, 128]
    assert [tiling.span for tiling in tilings] == [32, 64, 32]
    assert {tiling.span for tiling in small} == {32}, "rounds are shorter where memory is"
    in_f16 = matmul_tuning.on_matrix_units(replace(capabilities, matrix=replace(UNIT, sums="f16")), call)
    assert {(tiling.sums, tiling.span) for tiling in in_f16} == {("f16", 32)}
    assert [Tiling.from_json(tiling.to_json()) for tiling in in_f16] == in_f16
