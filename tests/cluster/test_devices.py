"""The devices of a machine: names that stay, memory, and who holds it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wgpu_lora.cli.app import main
from wgpu_lora.cluster import device_resources
from wgpu_lora.cluster.device_resources import Speed, advertised, node_devices, plan_class, resource_key
from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.gpu.memory_leases import DeviceMemory, Ledger, LedgerEntry, device_key

NVIDIA = DeviceInfo(0, "NVIDIA H100", "580", 0x10DE, "Vulkan", "discrete", ("subgroup",), {"a-limit": 9}, 0x2330)
AMD = DeviceInfo(1, "AMD Radeon RX 7900 XTX (RADV)", "radv", 0x1002, "Vulkan", "discrete", (), {}, 0x744C)
CPU = DeviceInfo(2, "llvmpipe (LLVM 15.0.6, 256 bits)", "Mesa 25", 0x10005, "Vulkan", "software", (), {})


def cards(root: Path, *ids: tuple[int, int]) -> Path:
    """PCI devices as /sys has them, one on each bus."""
    for number, (vendor, device) in enumerate(ids, 1):
        place = root / f"0000:{number:02x}:00.0"
        place.mkdir(parents=True)
        (place / "vendor").write_text(f"{vendor:#06x}\n")
        (place / "device").write_text(f"{device:#06x}\n")
    return root


class NVML(SimpleNamespace):
    """NVML with cards of these PCI ids."""

    class NVMLError(Exception):
        pass

    def __init__(self, *ids: int, broken: bool = False) -> None:
        super().__init__(ids=ids, broken=broken)

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.ids)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetPciInfo(self, card: int) -> Any:
        return SimpleNamespace(pciDeviceId=self.ids[card] << 16 | 0x10DE)

    def nvmlDeviceGetUUID(self, card: int) -> str:
        return f"GPU-{card}"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(library: NVML | None) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", library)  # None: there is no such module

    install(None)
    return install


def listed(*infos: DeviceInfo) -> list[DeviceInfo]:
    return [replace(info, index=index) for index, info in enumerate(infos)]


def named(infos: Sequence[DeviceInfo], pci: Path) -> list[str]:
    return [resource_key(info, infos, pci).removeprefix("webgpu:") for info in infos]


def test_keys_are_uuids_or_addresses_or_models(tmp_path: Path, nvml: Any) -> None:
    pci = cards(tmp_path, (0x10DE, 0x2330), (0x1002, 0x744C), (0x8086, 0x1))
    infos = listed(NVIDIA, AMD, CPU)
    assert named(infos, pci) == ["0000:01:00.0", "0000:02:00.0", "software-llvmpipe-0"]
    nvml(NVML(0x1111, 0x2330))
    assert named(infos, pci) == ["GPU-1", "0000:02:00.0", "software-llvmpipe-0"]
    nvml(NVML(0x2330, broken=True))
    assert named(infos, pci)[0] == "0000:01:00.0"
    assert named(infos, tmp_path / "elsewhere") == [
        "discrete-nvidia-h100-0",
        "discrete-amd-radeon-rx-7900-xtx-0",
        "software-llvmpipe-0",
    ]


def test_equal_cards_are_numbered_and_a_card_that_is_hidden_is_not_confused(tmp_path: Path, nvml: Any) -> None:
    pci = cards(tmp_path, (0x10DE, 0x2330), (0x10DE, 0x2330))
    nvml(NVML(0x2330, 0x2330))
    assert named(listed(NVIDIA, NVIDIA), pci) == ["discrete-nvidia-h100-0", "discrete-nvidia-h100-1"]
    assert named(listed(NVIDIA), pci) == ["discrete-nvidia-h100-0"]  # which of the two, WebGPU does not say


def test_a_device_that_two_backends_list_is_one(tmp_path: Path, nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_resources, "PCI", cards(tmp_path, (0x10DE, 0x2330)))
    infos = listed(NVIDIA, replace(NVIDIA, backend="D3D12", driver="other"), CPU)
    monkeypatch.setattr(device_resources, "devices_here", lambda: infos)
    devices = node_devices("10.0.0.1")
    assert [(device.index, device.backend) for device in devices] == [(0, "Vulkan"), (2, "Vulkan")]
    assert len(set(named(infos, tmp_path))) == 2


def test_plan_classes_are_those_of_limits_and_features() -> None:
    assert plan_class(NVIDIA) == plan_class(replace(NVIDIA, index=5, driver="581"))
    for other in (
        replace(NVIDIA, features=()),
        replace(NVIDIA, limits={"a-limit": 10}),
        replace(NVIDIA, backend="D3D12"),
        replace(NVIDIA, kind="integrated"),
    ):
        assert plan_class(other) != plan_class(NVIDIA)


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceInfo:
    """A machine with one software device of 1,000 bytes, 600 of them its budget, 500 free."""
    (info,) = infos = listed(CPU)
    monkeypatch.setenv("WGPU_LORA_SHARE_DIR", str(tmp_path / "share"))
    monkeypatch.setenv("WGPU_LORA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(device_resources, "devices_here", lambda: infos)
    monkeypatch.setattr(device_resources, "device_memory", lambda info: DeviceMemory(1000, "a test", 500))
    monkeypatch.setattr(
        "wgpu_lora.gpu.memory_leases.memory_budget.device_memory", lambda info: DeviceMemory(1000, "a test", 500)
    )
    return info


def test_leases_are_held_and_what_is_free_is_the_least(cpu: DeviceInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = node_devices("10.0.0.1")
    assert (before.budget, before.held, before.free, before.leases) == (600, 0, 500, [])
    assert (before.id, before.speed) == ("10.0.0.1/webgpu:software-llvmpipe-0", None)
    ledger = Ledger(device_key(cpu, [cpu]))
    with ledger.changing() as entries:
        entries += [
            LedgerEntry.of_this_process(250, "finetune out", holds=True),
            LedgerEntry.of_this_process(999, "queued"),
            replace(LedgerEntry.of_this_process(70, "of a dead process", holds=True), started=1),
        ]
    monkeypatch.setattr(device_resources, "cached", lambda info: Speed(120.0, 1.5))
    (now,) = node_devices("10.0.0.1")
    assert (now.held, now.free, now.speed, now.joined_speedup) == (250, 350, 120.0, 1.5)
    (lease,) = now.leases
    assert lease.startswith("250 bytes by pid ")
    assert "(finetune out)" in lease


def test_a_damaged_ledger_leaves_nothing_free(cpu: DeviceInfo) -> None:
    ledger = Ledger(device_key(cpu, [cpu]))
    ledger.directory.mkdir(parents=True)
    ledger.path.write_text("zork")
    (device,) = node_devices("10.0.0.1")
    assert (device.free, device.held) == (0, 0)
    assert "wgpu-lora share repair" in device.leases[0]


def test_resources_are_one_of_each_and_their_number(cpu: DeviceInfo, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "resources"]) == 0
    resources = json.loads(capsys.readouterr().out)
    assert resources == advertised(node_devices("anywhere")) == {"webgpu:software-llvmpipe-0": 1.0, "webgpu": 1.0}
    assert advertised([]) == {}


def test_the_devices_here_are_found() -> None:
    devices = node_devices("10.0.0.1")
    assert devices
    assert len({device.key for device in devices}) == len(devices)
    assert all(device.key.startswith("webgpu:") and device.plan_class for device in devices)


def test_devices_are_listed_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_resources, "list_devices", lambda: [threading.get_ident()])
    with ThreadPoolExecutor(4) as pool:
        threads = {
            number for numbers in pool.map(lambda _: device_resources.devices_here(), range(16)) for number in numbers
        }
    assert len(threads) == 1
    assert threading.get_ident() not in threads
