"""Errors of a device, with their numbers. Callers add which options would help."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from wgpu_lora.errors import NoRoomError, UserError
from wgpu_lora.events import WrongKernel
from wgpu_lora.names.spelling import any_option, flag, setting

REASON = 300  # characters of a compiler's message that are reported
MAX_GROUPS = 65535  # workgroups of a grid in each dimension, WebGPU's limit


class DeviceError(NoRoomError):
    """A device cannot do what was requested. `fact` is the message without the advice."""

    def __init__(self, fact: str):
        super().__init__(f"{fact}.")
        self.fact, self.advised = fact, False

    def advise(self, advice: str) -> None:
        """Adds advice to the message, unless a caller closer to the cause already has."""
        if not self.advised:
            super().__init__(f"{self.fact}: {advice}.")
            self.advised = True


class OutOfDeviceMemory(DeviceError):
    """A buffer of `nbytes` bytes could not be allocated while this process was using `in_use` bytes."""

    def __init__(self, name: str, nbytes: int, in_use: int):
        super().__init__(f"The device could not allocate {nbytes:,} bytes for {name} ({in_use:,} bytes are in use)")
        self.name, self.nbytes, self.in_use = name, nbytes, in_use


class BindingTooLarge(DeviceError):
    """A tensor of `nbytes` bytes exceeds `limit`, the largest binding or buffer of the device."""

    def __init__(self, name: str, nbytes: int, limit: int):
        super().__init__(
            f"The tensor '{name}' needs {nbytes:,} bytes, but one binding of this device holds at most {limit:,}"
        )
        self.name, self.nbytes, self.limit = name, nbytes, limit


class GridTooLarge(DeviceError):
    """A dispatch needs more workgroups in a dimension than WebGPU allows."""

    def __init__(self, kernel: str, groups: tuple[int, int, int]):
        super().__init__(f"{kernel} would need a grid of {groups}, more than WebGPU's {MAX_GROUPS}")
        self.kernel, self.groups, self.limit = kernel, groups, MAX_GROUPS


class DeviceLost(UserError):
    """The device stopped working: its driver was reset, for example by a watchdog, or it was unplugged."""

    def __init__(self, name: str):
        super().__init__(
            f"The device {name} was lost, for example because its driver was reset: run it again, and continue an "
            f"interrupted training run with {setting('resume', True)}; its last checkpoint is intact."
        )


class ShaderError(Exception):
    """A shader does not compile on this device: a bug in the shader or in the driver. `reason`: what the compiler said,
    in a line."""

    def __init__(self, label: str, reason: str):
        text = " ".join(reason.split())
        self.label, self.reason = label, text if len(text) <= REASON else f"{text[: REASON - 3]}..."
        super().__init__(f"{label} does not compile: {self.reason}")


class WrongResults(UserError):
    """A device gets a kernel wrong, or does not compile it, in all tilings, so nothing that uses it can be computed.
    `wrong_kernel`: the last one."""

    def __init__(self, wrong_kernel: WrongKernel):
        wrong = f"gets {wrong_kernel.kernel} wrong in every tiling ({wrong_kernel.difference})"
        if wrong_kernel.nmse is None:
            wrong = f"does not compile {wrong_kernel.kernel} ({wrong_kernel.reason})"
        super().__init__(
            f"{wrong_kernel.device} ({wrong_kernel.driver}) {wrong}: update the driver, or choose another device with "
            f"{flag('device')}."
        )
        self.wrong_kernel = wrong_kernel


LOST = re.compile(r"device\]? is lost", re.IGNORECASE)  # as wgpu-native and Dawn word it


@contextmanager
def raise_device_lost(name: str) -> Iterator[None]:
    """Raises DeviceLost for what a backend raises if the device is lost."""
    devices_in_use.append(name)
    try:
        yield
    except Exception as error:  # each backend has its own class
        if LOST.search(str(error)):
            raise DeviceLost(name) from error
        raise
    finally:
        devices_in_use.pop()


devices_in_use: list[str] = []  # names of the devices that this process is calling, the innermost last
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


@contextmanager
def report_native_abort() -> Iterator[None]:
    """Ends the process with a line on stderr and exit code 2 if wgpu-native aborts it while a device is in use.

    For the main program only: it changes what SIGABRT does. Nothing is written, so checkpoints stay as they are.
    """
    if os.name != "posix":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)

    def aborted(number: int) -> None:
        if devices_in_use:
            os.write(2, f"wgpu-lora: {DeviceLost(devices_in_use[-1])}\n".encode())
            os._exit(2)

    handler = _Handler(aborted)
    before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGABRT, before)


@contextmanager
def with_option_advice(*options: str, otherwise: str = "choose a smaller model") -> Iterator[None]:
    """Add to device errors raised in the block which options to lower, unless an inner block has done so.

    Can be used as a decorator.

    Args:
        options: names of options; lowering any of them helps.
        otherwise: what else helps if memory is short; the only advice if there are no options.
    """
    try:
        yield
    except DeviceError as error:
        advice = [f"lower {any_option(*options)}"] if options else []
        if not options or isinstance(error, OutOfDeviceMemory):
            advice.append(otherwise)
        error.advise(", or ".join(advice))
        raise
