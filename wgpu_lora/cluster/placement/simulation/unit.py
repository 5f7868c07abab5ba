"""A unit that trains on a modelled device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Running:
    """A unit on a device.

    The tasks of a pipeline advance by equally many tokens per second. While at least two of them train, the device is
    faster by its joined speed-up.

    Attributes:
        left: tokens of each task when it began, in order. needed: bytes.
        began: seconds; its first step is `loading` later. speed, gain: of its device.
        copies: seconds between copies.
    """

    device: str
    left: Mapping[str, float]
    needed: int
    began: float
    loading: float
    speed: float
    gain: float
    copies: float

    @property
    def end(self) -> float:
        """Seconds when all of its tasks have ended."""
        return self.began + self.loading + self._seconds()[1]

    def trained(self, now: float) -> dict[str, float]:
        """Tokens that are left of each task."""
        return self._after(max(now - self.began - self.loading, 0.0))

    def copied(self, now: float) -> dict[str, float]:
        """Tokens that are left of each task in the newest copy."""
        return self._after(max(now - self.began - self.loading, 0.0) // self.copies * self.copies)

    def _after(self, seconds: float) -> dict[str, float]:
        each = self._seconds(seconds)[0]
        return {task: max(tokens - each, 0.0) for task, tokens in self.left.items()}

    def _seconds(self, until: float = float("inf")) -> tuple[float, float]:
        """Tokens of each task, and seconds, after `until` seconds of training or all tokens."""
        done = spent = 0.0
        remaining = sorted(self.left.values())
        for index, tokens in enumerate(remaining):
            together = len(remaining) - index
            rate = self.speed * (self.gain if together > 1 else 1.0) / together
            seconds = (tokens - done) / rate
            if spent + seconds > until:
                return done + (until - spent) * rate, until
            done, spent = tokens, spent + seconds
        return done, spent
