"""The devices of this machine, listed by a process with several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from wgpu_lora.gpu.device_list import DeviceInfo, list_devices

# Adapters of OpenGL, which are listed and released too, belong to a thread: releasing one while another thread uses its
# EGL context aborts the process.
_ONE_THREAD = ThreadPoolExecutor(1, thread_name_prefix="devices")


def devices_here() -> list[DeviceInfo]:
    """As `list_devices`, for any thread."""
    return _ONE_THREAD.submit(list_devices).result()
