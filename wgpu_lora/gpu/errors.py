"""What a device refuses, with the numbers. Options are none of this package's business: callers add what would help."""

from __future__ import annotations

from wgpu_lora.errors import NoRoomError

MAX_GROUPS = 65535  # workgroups of a grid in each dimension, WebGPU's limit


class DeviceError(NoRoomError):
    """A device cannot do what was asked of it. `fact` says so, the message with what to do."""

    def __init__(self, fact: str):
        super().__init__(f"{fact}.")
        self.fact, self.advised = fact, False

    def advise(self, what: str) -> None:
        """Adds what to do to the message, unless somebody who knew more has done so."""
        if not self.advised:
            super().__init__(f"{self.fact}: {what}.")
            self.advised = True


class OutOfDeviceMemory(DeviceError):
    """A buffer could not be allocated. nbytes: of it. in_use: bytes that this process holds already."""

    def __init__(self, what: str, nbytes: int, in_use: int):
        super().__init__(f"The device could not allocate {nbytes:,} bytes for {what} ({in_use:,} bytes are in use)")
        self.what, self.nbytes, self.in_use = what, nbytes, in_use


class BindingTooLarge(DeviceError):
    """A tensor is larger than one binding, or one buffer, of the device may be. nbytes and limit: bytes."""

    def __init__(self, what: str, nbytes: int, limit: int):
        super().__init__(
            f"The tensor '{what}' needs {nbytes:,} bytes, but one binding of this device holds at most {limit:,}"
        )
        self.what, self.nbytes, self.limit = what, nbytes, limit


class GridTooLarge(DeviceError):
    """A dispatch would need more workgroups in a dimension than WebGPU allows."""

    def __init__(self, kernel: str, groups: tuple[int, int, int]):
        super().__init__(f"{kernel} would need a grid of {groups}, more than WebGPU's {MAX_GROUPS}")
        self.kernel, self.groups, self.limit = kernel, groups, MAX_GROUPS


class ShaderError(Exception):
    """A shader that the device's compiler refuses: a mistake here or there, and nothing that options would mend."""

    def __init__(self, label: str, reason: str):
        super().__init__(f"{label} does not compile: {reason}")
        self.label, self.reason = label, reason
