"""AMD cards on Linux, from the files of amdgpu: docs.kernel.org/gpu/amdgpu/thermal.html."""

from __future__ import annotations

import re
from pathlib import Path

from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.train.track.hardware import GIB, ReadStatus, Status, scaled

VENDOR = 0x1002
DRM, FDINFO = Path("/sys/class/drm"), Path("/proc/self/fdinfo")


def find(info: DeviceInfo, drm: Path = DRM, fdinfo: Path = FDINFO) -> ReadStatus | None:
    """The card of the device's id; of several, the one that this process has open."""
    if info.vendor_id != VENDOR:
        return None
    cards = [card / "device" for card in sorted(drm.glob("card*")) if re.fullmatch(r"card\d+", card.name)]
    cards = [card for card in cards if _hexadecimal(card / "vendor") == VENDOR]
    matches = [card for card in cards if _hexadecimal(card / "device") == info.device_id]
    if len(matches) > 1:
        opened = _opened(fdinfo)
        matches = [card for card in matches if card.resolve().name in opened]
    if len(matches) != 1:
        return None
    (card,) = matches
    return lambda: read(card)


def read(card: Path) -> Status:
    """The status of a card; files that it does not have are unknown values."""
    monitor = next(iter(sorted((card / "hwmon").glob("hwmon*"))), card / "hwmon")
    power = _number(monitor / "power1_average")
    return Status(
        temperature=scaled(_number(monitor / "temp1_input"), 1e-3),
        busy=_number(card / "gpu_busy_percent"),
        power=scaled(_number(monitor / "power1_input") if power is None else power, 1e-6),
        power_limit=scaled(_number(monitor / "power1_cap"), 1e-6),
        memory=scaled(_number(card / "mem_info_vram_used"), 1 / GIB),
    )


def _opened(fdinfo: Path) -> set[str]:
    """The PCI addresses of the devices that this process has open."""
    texts = [_text(file) for file in fdinfo.glob("*")]
    return {match[1] for text in texts if (match := re.search(r"^drm-pdev:\s*(\S+)", text, re.MULTILINE))}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    try:
        return float(_text(path))
    except ValueError:
        return None


def _hexadecimal(path: Path) -> int | None:
    try:
        return int(_text(path), 16)
    except ValueError:
        return None
