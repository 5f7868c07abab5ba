"""NVIDIA cards, by NVML (nvidia-ml-py, the extra `nvml`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.train.track.hardware import GIB, ReadStatus, Status, scaled

VENDOR = 0x10DE
TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU


def find(info: DeviceInfo) -> ReadStatus | None:
    """The card of the device's PCI id, else of its name; of several, the one that this process runs on."""
    if info.vendor_id != VENDOR:
        return None
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()  # for the rest of the process
        cards = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return None

    def query(function: str, *arguments: Any) -> Any:
        """The answer of NVML; None if the card does not support the query."""
        try:
            return getattr(nvml, function)(*arguments)
        except nvml.NVMLError:
            return None

    pci = info.device_id << 16 | VENDOR
    matches = [card for card in cards if getattr(query("nvmlDeviceGetPciInfo", card), "pciDeviceId", None) == pci]
    matches = matches or [card for card in cards if _name(query("nvmlDeviceGetName", card)) == info.name]
    if len(matches) > 1:
        matches = [card for card in matches if os.getpid() in _processes(query, card)]
    if len(matches) != 1:
        return None
    (card,) = matches
    return lambda: read(query, card)


def read(query: Callable[..., Any], card: Any) -> Status:
    use, memory = query("nvmlDeviceGetUtilizationRates", card), query("nvmlDeviceGetMemoryInfo", card)
    limit = query("nvmlDeviceGetEnforcedPowerLimit", card)
    return Status(
        temperature=query("nvmlDeviceGetTemperature", card, TEMPERATURE_GPU),
        busy=None if use is None else use.gpu,
        power=scaled(query("nvmlDeviceGetPowerUsage", card), 1e-3),
        power_limit=scaled(limit, 1e-3),
        memory=None if memory is None else memory.used / GIB,
    )


def _processes(query: Callable[..., Any], card: Any) -> set[int]:
    kinds = ("Graphics", "Compute")
    result = [query(f"nvmlDeviceGet{kind}RunningProcesses", card) or [] for kind in kinds]
    return {process.pid for processes in result for process in processes}


def _name(name: Any) -> str | None:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
