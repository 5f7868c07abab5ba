"""The status of the hardware that a run uses: a file for each source, and the thread that samples it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.names.registry import Registry

SOURCES: Registry[FindSource] = Registry(
    {
        "amdgpu": "wgpu_lora.train.track.hardware.amdgpu:find",
        "nvml": "wgpu_lora.train.track.hardware.nvml:find",
        "apple": "wgpu_lora.train.track.hardware.apple:find",
    }
)


def find(info: DeviceInfo) -> ReadStatus | None:
    """The reader of a device's status; None if there is none, or if the device cannot be told from others."""
    return next((read for name in SOURCES if (read := SOURCES[name](info))), None)


@dataclass(frozen=True)
class Status:
    """The status of a device; None is unknown.

    temperature: in degrees Celsius. busy: share of time in use, in percent. power, power_limit: in watts.
    memory: in use by all programs, in GiB.
    """

    temperature: float | None = None
    busy: float | None = None
    power: float | None = None
    power_limit: float | None = None
    memory: float | None = None


ReadStatus = Callable[[], Status]
FindSource = Callable[[DeviceInfo], ReadStatus | None]
GIB = 2.0**30


def scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by
