"""The memory of a session, known before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by group during training, and during loading; the peak is the larger of the two.

    host: bytes of offloaded activations in the host's memory, which no group counts.
    unified: whether the device has no other memory than the host's.
    """

    groups: dict[str, int]
    loading: int
    host: int = 0
    unified: bool = False

    @property
    def training(self) -> int:
        return sum(self.groups.values())

    @property
    def peak(self) -> int:
        return max(self.training, self.loading)

    @property
    def running(self) -> int:
        """Bytes during training of the memory that the device uses."""
        return self.training + (self.host if self.unified else 0)

    @property
    def guarded(self) -> int:
        """The same, or those during loading if they are more."""
        return max(self.running, self.loading)
