"""How a worker's process ended, as the coordinator hears it."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from wgpu_lora.cluster.node.progress import Standing

KILLS = [getattr(signal, name) for name in ("SIGTERM", "SIGKILL", "SIGINT", "SIGHUP") if hasattr(signal, name)]
NO_ROOM = ("NoRoomError", "OutOfDeviceMemory")
# Errors of a device, which another one may not have, though they are a person's to solve.
OF_DEVICE = ("DeviceError", "BindingTooLarge", "GridTooLarge", "DeviceLost", "WrongResults", "StorageError")
OF_TASK = ("UserError", "NotFiniteError")


@dataclass(frozen=True)
class Ending:
    """ended, said: as a Report has them."""

    ended: str
    said: str


CANCELLED = Ending("stopped", "")
VANISHED = Ending("failed", "The device is not there any more.")


def ending_of(code: int, standing: Standing, last_words: str, *, cancelled: bool) -> Ending:
    """The end of a process with an exit code, negative for a signal, as subprocess has it."""
    if cancelled and standing.error is None:
        return CANCELLED
    if standing.error:
        kind, message = standing.error
        if kind == "KeyboardInterrupt":
            return CANCELLED if cancelled else Ending("killed", "It was interrupted on its host.")
        if kind in NO_ROOM:
            return Ending("no room", message)
        return Ending("refused" if kind in OF_TASK else "failed", message)
    if -code in KILLS or code - 128 in KILLS:
        number = -code if code < 0 else code - 128
        return Ending("killed", f"It was ended by {signal.Signals(number).name} on its host.")
    if standing.result is not None:  # also if a task failed: the others have ended by themselves
        return Ending("done", standing.said)
    return Ending("failed", f"It ended with exit code {code}: {last_words}")
