"""The status of the hardware that a run uses: a file for each source, and the thread that samples it."""

from __future__ import annotations

from wgpu_lora.gpu.devices import DeviceInfo
from wgpu_lora.registry import Registry
from wgpu_lora.track.hardware.base import Find, Read

SOURCES: Registry[Find] = Registry(
    {
        "amdgpu": "wgpu_lora.track.hardware.amdgpu:find",
        "nvml": "wgpu_lora.track.hardware.nvml:find",
        "apple": "wgpu_lora.track.hardware.apple:find",
    }
)


def find(info: DeviceInfo) -> Read | None:
    """What reads the status of a device; None if nothing here can, or if it cannot be told from others."""
    return next((read for name in SOURCES if (read := SOURCES[name](info))), None)
