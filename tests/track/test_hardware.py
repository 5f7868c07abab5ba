"""The status of hardware, from made-up files and libraries."""

from __future__ import annotations

import os
import plistlib
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.train.track.hardware import Status, amdgpu, apple, find, nvml
from wgpu_lora.train.track.hardware.sampler import Sample, Sampler, held_back

AMD = DeviceInfo(0, "AMD Radeon RX 7900 XTX (RADV)", "radv", amdgpu.VENDOR, "Vulkan", "discrete", (), {}, 0x744C)
NVIDIA = DeviceInfo(0, "NVIDIA H200", "580", nvml.VENDOR, "Vulkan", "discrete", (), {}, 0x2335)
APPLE = DeviceInfo(0, "Apple M3", "", 0, "Metal", "integrated", (), {})
HELD = Status(busy=100.0, power=80.0, power_limit=355.0)


def card(root: Path, number: int, device: int = 0x744C, **files: str) -> None:
    """A card as amdgpu shows it, and one of its connectors, which links to it."""
    place = root / "devices" / f"0000:0{number}:00.0"
    contents = {
        "vendor": "0x1002", "device": f"{device:#06x}", "gpu_busy_percent": "97", "mem_info_vram_used": "3221225472",
        "hwmon/hwmon4/temp1_input": "61000", "hwmon/hwmon4/power1_average": "203000000",
        "hwmon/hwmon4/power1_cap": "355000000", **files,
    }  # fmt: skip
    (place / "hwmon" / "hwmon4").mkdir(parents=True)
    for name, text in contents.items():
        (place / name).write_text(text + "\n")
    for name in (f"card{number}", f"card{number}-DP-1"):
        (root / "drm" / name).mkdir(parents=True)
        (root / "drm" / name / "device").symlink_to(place)


def test_amdgpu(tmp_path: Path) -> None:
    drm, fdinfo = tmp_path / "drm", tmp_path / "fdinfo"
    card(tmp_path, 1, device=0x1638)  # another model
    card(tmp_path, 3)
    read = amdgpu.find(AMD, drm, fdinfo)
    assert read() == Status(61.0, 97.0, 203.0, 355.0, 3.0)
    monitor = tmp_path / "devices/0000:03:00.0/hwmon/hwmon4"
    (monitor / "power1_average").rename(monitor / "power1_input")  # as newer cards have it
    (monitor / "temp1_input").write_text("")
    (monitor / "power1_cap").unlink()
    assert read() == Status(None, 97.0, 203.0, None, 3.0)
    card(tmp_path, 4, gpu_busy_percent="5")  # which of two equal cards?
    assert amdgpu.find(AMD, drm, fdinfo) is None
    fdinfo.mkdir()
    (fdinfo / "7").write_text("pos:\t0\ndrm-driver:\tamdgpu\ndrm-pdev:\t0000:04:00.0\n")
    assert amdgpu.find(AMD, drm, fdinfo)().busy == 5.0


def fake_nvml(*cards: dict[str, Any], unknown: tuple[str, ...] = ()) -> SimpleNamespace:
    """NVML with some cards; `unknown` are functions that a card does not support."""
    error = type("NVMLError", (Exception,), {})
    functions = {name: Mock(side_effect=lambda handle, *_, name=name: handle[name]) for card in cards for name in card}
    functions |= {name: Mock(side_effect=error("not supported")) for name in unknown}
    functions["nvmlInit"] = Mock(side_effect=None if cards else error("driver not loaded"))
    functions["nvmlDeviceGetCount"] = lambda: len(cards)
    functions["nvmlDeviceGetHandleByIndex"] = lambda number: cards[number]
    return SimpleNamespace(NVMLError=error, **functions)


def nvidia(device: int = 0x2335, pids: tuple[int, ...] = (), busy: int = 88) -> dict[str, Any]:
    return {
        "nvmlDeviceGetPciInfo": SimpleNamespace(pciDeviceId=device << 16 | nvml.VENDOR),
        "nvmlDeviceGetName": b"NVIDIA H200",
        "nvmlDeviceGetTemperature": 55,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=busy),
        "nvmlDeviceGetPowerUsage": 420_000,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=2 << 30),
        "nvmlDeviceGetGraphicsRunningProcesses": [],
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in pids],
    }


@pytest.mark.parametrize(
    ("cards", "unknown", "expected"),
    [
        ([nvidia()], (), Status(55, 88, 420.0, 700.0, 2.0)),
        ([nvidia()], ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"), Status(55, None, None, 700.0, 2.0)),
        ([nvidia()], ("nvmlDeviceGetPciInfo",), Status(55, 88, 420.0, 700.0, 2.0)),  # by its name
        ([nvidia(0x1EB8), nvidia(busy=7)], (), Status(55, 7, 420.0, 700.0, 2.0)),
        ([nvidia(pids=(1,)), nvidia(pids=(1, os.getpid()), busy=9)], (), Status(55, 9, 420.0, 700.0, 2.0)),
        ([nvidia(), nvidia()], (), None),  # which of two equal cards?
        ([], (), None),
    ],
)
def test_nvml(cards: Any, unknown: Any, expected: Status | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*cards, unknown=unknown))
    read = find(NVIDIA)
    assert (read() if read else None) == expected


def test_apple() -> None:
    ioreg = plistlib.dumps([{"PerformanceStatistics": {"Device Utilization %": 93, "In use system memory": 1 << 30}}])
    power = plistlib.dumps({"elapsed_ns": 200_000_000, "gpu": {"gpu_energy": 2400}}) + b"\0"
    assert apple.status(ioreg, power) == Status(busy=93.0, power=12.0, memory=1.0)
    assert apple.status(ioreg, b"") == Status(busy=93.0, memory=1.0)
    for broken in (b"", b"x", plistlib.dumps([]), plistlib.dumps([{"PerformanceStatistics": "no"}])):
        assert apple.status(broken, broken) == Status()


@pytest.mark.parametrize("info", [AMD, NVIDIA, APPLE])
def test_absent_hardware_gives_nothing(
    info: DeviceInfo, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # cannot be imported
    monkeypatch.setattr(apple.sys, "platform", "linux")
    monkeypatch.setattr(amdgpu.find, "__defaults__", (tmp_path, tmp_path))
    sampler = Sampler(info, 0.0)
    sampler.start()
    assert sampler._thread
    sampler._thread.join(10)
    assert not sampler._thread.is_alive()
    assert (sampler.since(0.0), sampler.warning()) == ({}, "")
    assert not recwarn.list


def with_samples(*statuses: Status, interval: float = 5.0) -> Sampler:
    """A sampler that has taken these, the first at the time 0."""
    sampler = Sampler(AMD)
    sampler._samples.extend(Sample(number * interval, status) for number, status in enumerate(statuses))
    return sampler


def test_means_of_what_is_known() -> None:
    sampler = with_samples(
        Status(busy=10.0), Status(busy=20.0, power=5.0), Status(busy=float("nan")), Status(busy=40.0)
    )
    assert sampler.since(0.0) == {"gpu_busy": pytest.approx(70 / 3, abs=1e-3), "gpu_power": 5.0}
    assert sampler.since(15.0) == {"gpu_busy": 40.0}
    assert sampler.since(16.0) == {}


def test_a_warning_where_the_power_stays_low_at_full_use() -> None:
    assert held_back(HELD)
    for other in (Status(busy=98.0, power=80.0, power_limit=355.0), Status(busy=100.0, power=107.0, power_limit=355.0)):
        assert not held_back(other)
        assert with_samples(*[HELD] * 6, other, *[HELD] * 6).warning() == ""  # not for 30 s at a stretch
    assert not held_back(Status(busy=100.0, power=80.0))
    assert with_samples(*[HELD] * 6).warning() == ""
    sampler = with_samples(Status(), *[HELD] * 7)
    assert "takes 80 W of 355 W" in sampler.warning()
    assert sampler.warning() == ""  # once


def test_a_source_that_fails_or_hangs_cannot_hurt(recwarn: pytest.WarningsRecorder) -> None:
    sampler = Sampler(AMD, 0.0, lambda info: Mock(side_effect=[HELD, RuntimeError("the driver has gone")]))
    sampler.start()
    assert sampler._thread
    sampler._thread.join(10)
    assert sampler.since(0.0)["gpu_power"] == 80.0
    hung = threading.Event()
    hanging = Sampler(AMD, 0.0, lambda info: lambda: hung.wait(60) and HELD)
    hanging.start()
    begin = time.monotonic()
    assert hanging.since(0.0) == {}
    hanging.stop()
    assert time.monotonic() - begin < 5
    hung.set()
    assert not recwarn.list


def test_software_devices_are_not_sampled() -> None:
    sampler = Sampler(DeviceInfo(0, "llvmpipe", "", 0x10005, "Vulkan", "software", (), {}))
    sampler.start()
    assert sampler._thread is None
