"""How long a device may train without hearing from the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


def boot_time() -> float:
    """Seconds since the machine has started, those of its sleep included, where the system counts them."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass
class Lease:
    """Counts from when the last report that was answered had been sent.

    The coordinator counts from when it answered, which is later, so it never takes a lease for ended that the device
    believes in, whatever their clocks say. There is no lease before the first answer.
    """

    seconds: float
    now: Callable[[], float] = boot_time
    _since: float | None = None

    def renew(self, sent: float) -> None:
        """A report that was sent at this time has been answered."""
        self._since = sent if self._since is None else max(self._since, sent)

    @property
    def begun(self) -> bool:
        return self._since is not None

    def holds(self) -> bool:
        """Whether the device may train and write copies."""
        return self._since is not None and self.now() - self._since < self.seconds
