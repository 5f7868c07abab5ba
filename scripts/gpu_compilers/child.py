"""Compiles every call, with a marker before each: python -m scripts.gpu_compilers.child SUBGROUP_SIZE WANTED SKIPPED.

Runs where a shim pretends that the GPU is there. The compiler prints between the markers.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

from scripts.gpu_compilers.recorded import calls
from scripts.gpu_compilers.wanted import Wanted
from wgpu_lora.gpu.device import Device, DeviceOptions
from wgpu_lora.gpu.device_errors import ShaderError

MARKER = "@@gpu-compilers "  # begins a line; JSON follows
_LIBC, LINES = ctypes.CDLL(None), 1  # _IOLBF


def mark(what: dict[str, Any]) -> None:
    """Write a marker after all that the compilers have printed so far."""
    _LIBC.fflush(None)  # drivers print with C's buffers
    os.write(sys.stdout.fileno(), f"\n{MARKER}{json.dumps(what)}\n".encode())


def main(subgroup_size: int, wanted: Wanted, skipped: int) -> None:
    """skipped: how many calls to leave out, counted from the first."""
    # A driver that prints to both streams would break lines of the one that is buffered.
    _LIBC.setvbuf(ctypes.c_void_p.in_dll(_LIBC, "stdout"), None, LINES, 0)
    device = Device(0, DeviceOptions(subgroup_size=subgroup_size))
    mark({"device": device.info.name, "driver": device.info.driver, "software": device.capabilities.software})
    for call in calls(wanted, device)[skipped:]:
        mark({"call": call.to_json()})
        try:
            call.kernel.compute_pipeline(device, call.present, call.constants, call.tiling)
        except ShaderError as error:
            mark({"error": str(error)})
    mark({"end": True})


if __name__ == "__main__":
    main(int(sys.argv[1]), Wanted.from_json(sys.argv[2]), int(sys.argv[3]))
