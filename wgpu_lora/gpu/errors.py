"""Errors of a device, with their numbers. Callers add which options would help."""

from __future__ import annotations

from wgpu_lora.errors import NoRoomError, UserError
from wgpu_lora.events import Miscompiled
from wgpu_lora.names.naming import flag, setting

REASON = 300  # characters of a compiler's message that are reported
MAX_GROUPS = 65535  # workgroups of a grid in each dimension, WebGPU's limit


class DeviceError(NoRoomError):
    """A device cannot do what was requested. `fact` is the message without the advice."""

    def __init__(self, fact: str):
        super().__init__(f"{fact}.")
        self.fact, self.advised = fact, False

    def advise(self, what: str) -> None:
        """Adds advice to the message, unless a caller closer to the cause already has."""
        if not self.advised:
            super().__init__(f"{self.fact}: {what}.")
            self.advised = True


class OutOfDeviceMemory(DeviceError):
    """A buffer of `nbytes` bytes could not be allocated while this process was using `in_use` bytes."""

    def __init__(self, what: str, nbytes: int, in_use: int):
        super().__init__(f"The device could not allocate {nbytes:,} bytes for {what} ({in_use:,} bytes are in use)")
        self.what, self.nbytes, self.in_use = what, nbytes, in_use


class BindingTooLarge(DeviceError):
    """A tensor of `nbytes` bytes exceeds `limit`, the largest binding or buffer of the device."""

    def __init__(self, what: str, nbytes: int, limit: int):
        super().__init__(
            f"The tensor '{what}' needs {nbytes:,} bytes, but one binding of this device holds at most {limit:,}"
        )
        self.what, self.nbytes, self.limit = what, nbytes, limit


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
        said = " ".join(reason.split())
        self.label, self.reason = label, said if len(said) <= REASON else f"{said[: REASON - 3]}..."
        super().__init__(f"{label} does not compile: {self.reason}")


class WrongResults(UserError):
    """A device gets a kernel wrong, or does not compile it, in all tilings, so nothing that uses it can be computed.
    `found`: the last one."""

    def __init__(self, found: Miscompiled):
        wrong = f"gets {found.kernel} wrong in every tiling ({found.difference})"
        if found.nmse is None:
            wrong = f"does not compile {found.kernel} ({found.reason})"
        super().__init__(
            f"{found.device} ({found.driver}) {wrong}: update the driver, or choose another device with "
            f"{flag('device')}."
        )
        self.found = found
