"""The broker's clock, which is never believed if it goes backwards."""

from __future__ import annotations

import time

from wgpu_lora.errors import UserError

SLACK = 5.0  # seconds; steps of time synchronisation are smaller


def _elapsed() -> float:
    """Seconds that no setting of the clock changes; on Linux they go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Clock:
    """The time, checked against the latest time in the log and against the time that passed in this process.

    Args:
        logged: the latest time in the log, in seconds since 1970.
    """

    def __init__(self, logged: float = 0.0) -> None:
        self._start, self._elapsed = time.time(), _elapsed()
        self._logged = logged

    def now(self) -> float:
        """Seconds since 1970.

        Raises:
            UserError: the clock shows an earlier time than before.
        """
        now, passed = time.time(), self._start + _elapsed() - self._elapsed
        if now + SLACK < max(self._logged, passed):
            behind = max(self._logged, passed) - now
            raise UserError(
                f"The clock of this machine was set back by {behind:,.0f} s, so that nothing can be dated: set it "
                "right and start the broker again, with a new --state directory if it had been ahead."
            )
        self._logged = max(self._logged, now)
        return max(now, passed)
