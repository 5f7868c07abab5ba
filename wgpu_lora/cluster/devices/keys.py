"""Names of a machine's devices that stay the same when it restarts: by NVML's UUID, else PCI address, else model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.memory_leases import device_key
from wgpu_lora.memory_leases.memory_budget import ask_nvml

PREFIX = "webgpu:"  # of the resources in Ray
PCI = Path("/sys/bus/pci/devices")
NVIDIA = 0x10DE


def resource_key(info: DeviceInfo, listed: Sequence[DeviceInfo], pci: Path = PCI) -> str:
    """The name of a device among all `listed` ones of its machine.

    WebGPU does not tell equal cards apart, so these are numbered as they are listed. A device that several backends or
    drivers list has the same name.
    """
    return PREFIX + (_uuid(info, listed) or _address(info, listed, pci) or _slug(device_key(info, listed)))


def _uuid(info: DeviceInfo, listed: Sequence[DeviceInfo]) -> str | None:
    """The UUID of an NVIDIA card; None if NVML is missing, or knows another number of such cards than one."""
    if info.vendor_id != NVIDIA or not _single(info, listed):
        return None

    def ask(nvml: Any, cards: list[Any]) -> str | None:
        wanted = info.device_id << 16 | NVIDIA
        uuids = [
            nvml.nvmlDeviceGetUUID(card) for card in cards if nvml.nvmlDeviceGetPciInfo(card).pciDeviceId == wanted
        ]
        if len(uuids) != 1:
            return None
        return uuids[0].decode() if isinstance(uuids[0], bytes) else str(uuids[0])

    return ask_nvml(ask)


def _address(info: DeviceInfo, listed: Sequence[DeviceInfo], pci: Path) -> str | None:
    """The PCI address of the only device with these ids; None elsewhere than on Linux."""
    if not info.vendor_id or not info.device_id or not _single(info, listed):
        return None
    wanted = (info.vendor_id, info.device_id)
    alike = [place.name for place in sorted(pci.glob("*")) if (_id(place / "vendor"), _id(place / "device")) == wanted]
    return alike[0] if len(alike) == 1 else None


def _single(info: DeviceInfo, listed: Sequence[DeviceInfo]) -> bool:
    """Whether no other listed device is an equal card."""

    def listing(one: DeviceInfo) -> tuple[str, ...]:
        return one.name, one.kind, one.backend, one.driver

    return sum(listing(one) == listing(info) for one in listed) <= 1


def _id(path: Path) -> int | None:
    try:
        return int(path.read_text().strip(), 16)
    except (OSError, ValueError):
        return None


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
