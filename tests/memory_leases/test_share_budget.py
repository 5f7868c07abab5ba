"""How much of a device may be used, from what each operating system says of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from support.processes.share import adapter

from wgpu_lora.gpu.memory_leases import memory_budget as module
from wgpu_lora.gpu.memory_leases.memory_budget import (
    DeviceMemory,
    amdgpu_memory,
    budget_bytes,
    device_memory,
    metal_memory,
    nvml_memory,
)

GIB = 1 << 30


def amd_card(drm: Path, name: str, total: int, maker: str = "samsung", vendor: str = "0x1002") -> None:
    device = drm / name / "device"
    device.mkdir(parents=True)
    facts = {"vendor": vendor, "mem_info_vram_total": total, "mem_info_vram_used": GIB, "mem_info_vram_vendor": maker}
    for file, value in facts.items():
        (device / file).write_text(f"{value}\n")
    connector = drm / f"{name}-DP-1"
    connector.mkdir()
    (connector / "device").symlink_to(drm / name)


def test_amdgpu_reads_the_card(tmp_path: Path) -> None:
    first = DeviceMemory(8 * GIB, "amdgpu, card1", 7 * GIB)
    smallest = DeviceMemory(6 * GIB, "amdgpu, card3, the smallest of 2 AMD cards", 5 * GIB)
    assert amdgpu_memory(tmp_path) is None
    for name, total, facts, expected in (
        ("card0", 4 * GIB, {"vendor": "0x10de"}, None),
        ("card1", 8 * GIB, {}, first),
        ("card2", GIB // 2, {"maker": "unknown"}, first),  # an APU's
        ("card3", 6 * GIB, {}, smallest),
    ):
        amd_card(tmp_path, name, total, **facts)
        assert amdgpu_memory(tmp_path) == expected


def test_amdgpu_without_vram_counters(tmp_path: Path) -> None:
    amd_card(tmp_path, "card0", 8 * GIB)
    for file, expected in (
        ("used", DeviceMemory(8 * GIB, "amdgpu, card0", None)),
        ("total", None),
    ):  # as radeon's cards
        (tmp_path / f"card0/device/mem_info_vram_{file}").unlink()
        assert amdgpu_memory(tmp_path) == expected


def fake_nvml(cards: list[tuple[str, int]]) -> Any:
    error = type("NVMLError", (Exception,), {})
    return SimpleNamespace(
        NVMLError=error,
        nvmlInit=Mock(side_effect=None if cards else error),
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda i: cards[i][0],
        nvmlDeviceGetMemoryInfo=lambda i: SimpleNamespace(total=cards[i][1], free=cards[i][1] // 2),
    )


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        ([("NVIDIA A", 8), ("NVIDIA B", 16)], DeviceMemory(16, "NVML", 8)),
        ([("NVIDIA B", 24), ("NVIDIA B", 16)], DeviceMemory(16, "NVML, the smallest of 2 cards of this name", 8)),
        ([("NVIDIA A", 8)], DeviceMemory(8, "NVML", 4)),
        ([("NVIDIA A", 8), ("NVIDIA C", 16)], None),
        ([], None),
        (None, None),  # not installed
    ],
)
def test_nvml_matches_by_name(
    monkeypatch: pytest.MonkeyPatch, cards: list[tuple[str, int]] | None, expected: DeviceMemory | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None if cards is None else fake_nvml(cards))
    assert nvml_memory("NVIDIA B") == expected


def fake_metal(name: bytes, total: int) -> Any:
    """Loads frameworks whose default device answers its name and its working set."""

    def function(call: Any) -> Any:
        return lambda *arguments: call(*arguments)  # like ctypes' own, it takes attributes

    answers = {b"name": 2, b"UTF8String": name, b"recommendedMaxWorkingSetSize": total}
    library = SimpleNamespace(
        MTLCreateSystemDefaultDevice=function(lambda: 1),
        sel_registerName=function(lambda message: message),
        objc_msgSend=function(lambda target, message: answers[message]),
    )
    return lambda path: library


def test_metal_asks_its_default_device() -> None:
    assert metal_memory("Apple M4", fake_metal(b"Apple M4", 12 * GIB)) == DeviceMemory(
        12 * GIB, "Metal's recommended working set"
    )
    assert metal_memory("Apple M4", fake_metal(b"AMD Radeon Pro", 12 * GIB)) is None
    assert metal_memory("Apple M4", fake_metal(b"Apple M4", 0)) is None


@pytest.mark.parametrize(
    ("facts", "source", "budget"),
    [
        ({"kind": "software"}, "system_memory", 600),
        ({"kind": "integrated", "vendor_id": module.AMD}, "system_memory", 600),  # an APU
        ({"vendor_id": module.AMD}, "amdgpu_memory", 850),
        ({"vendor_id": module.NVIDIA, "backend": "D3D12"}, "nvml_memory", 850),
        ({"backend": "Metal", "name": "Apple M4", "kind": "integrated"}, "metal_memory", 600),
        ({"backend": "Metal", "name": "Apple M4"}, "metal_memory", 600),  # whatever kind a driver calls it
        ({"vendor_id": 0x8086}, None, None),
    ],
)
def test_each_device_is_asked_of_its_own(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], source: str | None, budget: int | None
) -> None:
    for name in ("system_memory", "amdgpu_memory", "nvml_memory", "metal_memory"):
        monkeypatch.setattr(module, name, lambda *_, source=name: DeviceMemory(1000, source))
    assert getattr(device_memory(adapter(**facts)), "source", None) == source
    assert budget_bytes(adapter(**facts)).bytes == budget


def test_the_budget_says_where_it_is_from() -> None:
    total = psutil.virtual_memory().total
    budget = budget_bytes(adapter(kind="software"))
    assert budget.bytes == int(0.6 * total)
    assert f"0.60 of {total:,} bytes" in budget.source
    assert budget_bytes(adapter(kind="software"), 5).bytes == 5
    assert budget_bytes(adapter(kind="software"), 5).source == "memory_budget"
    unknown = budget_bytes(adapter(vendor_id=0x8086))
    assert unknown.bytes is None
    assert "memory_budget" in unknown.source
