"""Lost devices: a typed error instead of the native library's own.

wgpu-native reports the loss in most calls, but aborts the process if it finds out while it submits work or waits for it
(`gpu.aborted`). Once it knows, commands that are finished before they are submitted report it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import wgpu

from wgpu_lora.gpu.aborted import USING
from wgpu_lora.gpu.errors import DeviceLost

LOST = "device is lost"  # in wgpu's messages


@contextmanager
def noticing(name: str) -> Iterator[None]:
    """Raises DeviceLost for what wgpu raises if the device is lost."""
    USING.append(name)
    try:
        yield
    except (wgpu.GPUError, RuntimeError) as error:
        if LOST in str(error).lower():
            raise DeviceLost(name) from error
        raise
    finally:
        USING.pop()
