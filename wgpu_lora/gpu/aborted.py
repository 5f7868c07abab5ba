"""The end of a process that wgpu-native aborts, because its device is lost, as a sentence and an exit code."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from wgpu_lora.gpu.errors import DeviceLost

USING: list[str] = []  # names of the devices that this process is calling, the innermost last
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


@contextmanager
def explained() -> Iterator[None]:
    """Ends the process with a line on stderr and exit code 2 if wgpu-native aborts it while a device is in use.

    For the main program only: it changes what SIGABRT does. Nothing is written, so checkpoints stay as they are.
    """
    if os.name != "posix":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)

    def aborted(number: int) -> None:
        if USING:
            os.write(2, f"wgpu-lora: {DeviceLost(USING[-1])}\n".encode())
            os._exit(2)

    handler = _Handler(aborted)
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGABRT, before)
