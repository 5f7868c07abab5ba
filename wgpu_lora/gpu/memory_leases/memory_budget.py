"""The memory budget of a device: its memory as reported by the system, times a reserve factor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from wgpu_lora.files.installation import pip_line
from wgpu_lora.names.spelling import flag

if TYPE_CHECKING:
    from wgpu_lora.gpu.device_list import DeviceInfo


# The rest is left to the desktop, the driver and, with unified memory, the host's programs.
DISCRETE, UNIFIED = 0.85, 0.60
AMD, NVIDIA = 0x1002, 0x10DE
DRM = Path("/sys/class/drm")


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of device memory, who reports them, and how many are free now (None if unknown)."""

    total: int
    source: str
    free: int | None = None


@dataclass(frozen=True)
class Budget:
    """Bytes that all runs on a device may hold together (None if unknown), and where the number comes from."""

    bytes: int | None
    source: str
    stated: bool = False  # set by the user


def budget_bytes(info: DeviceInfo, explicit: int | None = None) -> Budget:
    """The budget of a device in bytes: `explicit` (--memory-budget) if given, else from the system's report."""
    if explicit is not None:
        return Budget(explicit, flag("memory_budget"), stated=True)
    memory = device_memory(info)
    if memory is None:
        unasked = info.vendor_id == NVIDIA and find_spec("pynvml") is None
        install = f", or install NVML: {pip_line('nvml')}" if unasked else ""
        return Budget(None, f"the system does not report it: only {flag('memory_budget')} guards this device{install}")
    share = UNIFIED if is_unified(info) else DISCRETE
    return Budget(int(share * memory.total), f"{share:.2f} of {memory.total:,} bytes ({memory.source})")


def device_memory(info: DeviceInfo) -> DeviceMemory | None:
    """A device's memory as the operating system reports it; None if it does not."""
    if info.backend == "Metal" and (result := metal_memory(info.name)):
        return result
    if is_unified(info):
        return system_memory()
    if info.vendor_id == AMD:
        return amdgpu_memory()
    if info.vendor_id == NVIDIA:
        return nvml_memory(info.name)
    return None


def is_unified(info: DeviceInfo) -> bool:
    """Whether the device uses system memory."""
    return info.kind in ("integrated", "software") or info.name.startswith("Apple")


def system_memory() -> DeviceMemory:
    memory = psutil.virtual_memory()
    return DeviceMemory(memory.total, "the system's memory", memory.available)


def amdgpu_memory(drm: Path = DRM) -> DeviceMemory | None:
    """The memory of this machine's AMD card as amdgpu reports it; the smallest of several, to be safe."""
    cards = []
    for device in drm.glob("card*/device"):
        if _line(device / "vendor") == f"{AMD:#06x}" and (total := _line(device / "mem_info_vram_total")).isdigit():
            usage = _line(device / "mem_info_vram_used")
            free = int(total) - int(usage) if usage.isdigit() else None
            # An APU reports a small part of system memory, without a vendor.
            integrated = _line(device / "mem_info_vram_vendor") in ("", "unknown")
            cards.append((integrated, int(total), free, device.parent.name))
    if not cards:
        return None
    alike = [card for card in cards if card[0] == min(cards)[0]]
    _, total_bytes, free, name = min(alike, key=lambda card: card[1])
    note = f", the smallest of {len(alike)} AMD cards" if len(alike) > 1 else ""
    return DeviceMemory(total_bytes, f"amdgpu, {name}{note}", free)


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def nvml_memory(name: str) -> DeviceMemory | None:
    """The memory of the NVIDIA card of this name, else of the only one; None without nvidia-ml-py."""

    def ask(nvml: Any, cards: list[Any]) -> DeviceMemory | None:
        matches = [card for card in cards if nvml.nvmlDeviceGetName(card) == name]
        if not matches and len(cards) != 1:
            return None
        smallest = min(
            (nvml.nvmlDeviceGetMemoryInfo(card) for card in matches or cards), key=lambda memory: memory.total
        )
        note = f", the smallest of {len(matches)} cards of this name" if len(matches) > 1 else ""
        return DeviceMemory(smallest.total, f"NVML{note}", smallest.free)

    return ask_nvml(ask)


def metal_memory(name: str, load: Callable[[str], Any] = ctypes.CDLL) -> DeviceMemory | None:
    """The working set that Metal recommends for its default device; None if that device has another name."""
    frameworks = "/System/Library/Frameworks"
    try:
        load(f"{frameworks}/CoreGraphics.framework/CoreGraphics")  # Metal finds no default device without it
        metal, objc = load(f"{frameworks}/Metal.framework/Metal"), load("/usr/lib/libobjc.dylib")
        metal.MTLCreateSystemDefaultDevice.restype = ctypes.c_void_p
        objc.sel_registerName.restype = ctypes.c_void_p
        objc.sel_registerName.argtypes = [ctypes.c_char_p]
        objc.objc_msgSend.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

        def send(target: Any, message: bytes, result: Any) -> Any:
            objc.objc_msgSend.restype = result
            return objc.objc_msgSend(target, objc.sel_registerName(message))

        device = metal.MTLCreateSystemDefaultDevice()
        label = send(send(device, b"name", ctypes.c_void_p), b"UTF8String", ctypes.c_char_p) if device else None
        if not label or label.decode() != name:
            return None
        total = send(device, b"recommendedMaxWorkingSetSize", ctypes.c_uint64)
    except (OSError, AttributeError):
        return None
    return DeviceMemory(total, "Metal's recommended working set") if total else None


T = TypeVar("T")


def ask_nvml(ask: Callable[[Any, list[Any]], T]) -> T | None:
    """The result of `ask`, given NVML and its handles of all cards; None without nvidia-ml-py or its driver, or if NVML
    fails."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            return ask(nvml, [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())])
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None
