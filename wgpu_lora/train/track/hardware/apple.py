"""Apple's GPUs: ioreg needs no rights; powermetrics, which knows the power, only runs as root."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from typing import Any

from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.train.track.hardware import GIB, ReadStatus, Status, scaled

IOREG = ("/usr/sbin/ioreg", "-a", "-r", "-d", "1", "-c", "IOAccelerator")
POWERMETRICS = ("/usr/bin/powermetrics", "-n", "1", "-i", "200", "--samplers", "gpu_power", "-f", "plist")
SECONDS = 5.0


def find(info: DeviceInfo) -> ReadStatus | None:
    if sys.platform != "darwin" or not info.name.startswith("Apple"):
        return None
    root = os.geteuid() == 0
    return lambda: status(_output(IOREG), _output(POWERMETRICS) if root else b"")


def status(ioreg: bytes, powermetrics: bytes) -> Status:
    """The status from the property lists that both print."""
    accelerators, power = _plist(ioreg), _plist(powermetrics)
    result = accelerators[0] if isinstance(accelerators, list) and accelerators else {}
    statistics = result.get("PerformanceStatistics") if isinstance(result, dict) else None
    statistics = statistics if isinstance(statistics, dict) else {}
    return Status(
        busy=_number(statistics.get("Device Utilization %")),
        power=_power(power if isinstance(power, dict) else {}),
        memory=scaled(_number(statistics.get("In use system memory")), 1 / GIB),
    )


def _power(sample: dict[str, Any]) -> float | None:
    """Watts: the GPU's energy in mJ over the time in ns."""
    gpu = sample.get("gpu")
    energy = _number(gpu.get("gpu_energy")) if isinstance(gpu, dict) else None
    elapsed = _number(sample.get("elapsed_ns"))
    return energy * 1e6 / elapsed if energy is not None and elapsed else None


def _plist(data: bytes) -> Any:
    try:
        return plistlib.loads(data.rstrip(b"\0"))
    except Exception:  # plistlib raises whatever its parsers do
        return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _output(command: tuple[str, ...]) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, timeout=SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return b""
