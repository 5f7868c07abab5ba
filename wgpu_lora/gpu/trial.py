"""A call whose tilings are timed, and what was found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from wgpu_lora.gpu.choices import Entry
from wgpu_lora.gpu.cuts import tuning_of
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.tiling import Tiling

GAIN = 0.03  # a tiling replaces the default if it is faster by more than this share


@dataclass
class Trial:
    """Attributes:
    tilings: the default first. tried: how many of them, in order.
    work: multiply-adds of all calls of the programs that the choice is for.
    timed: (seconds, tiling) of those that are right. took: seconds that this needed.
    untimed: the first right one, where all that were timed are wrong.
    """

    call: Dispatch
    tilings: list[Tiling]
    work: float
    tried: int = 0
    timed: list[tuple[float, Tiling]] = field(default_factory=list)
    took: float = 0.0
    untimed: Tiling | None = None

    @property
    def is_over(self) -> bool:
        return self.tried == len(self.tilings)

    @property
    def all_wrong(self) -> bool:
        """Whether those that were tried are wrong, and no other is known to be right."""
        return self.tried > 0 and not self.timed and self.untimed is None

    @property
    def compared(self) -> bool:
        return len(self.timed) > 1

    @property
    def urgency(self) -> float:
        """The time of the calls in the programs, in seconds per tiling that was tried; infinite if all were wrong."""
        if not self.timed:
            return math.inf
        return self.timed[0][0] * self.work / tuning_of(self.call).work(self.call.constants) / self.tried

    @property
    def promising(self) -> bool:
        """Whether the tiling timed last would replace the default."""
        return len(self.timed) > 1 and self.timed[-1][0] < (1 - GAIN) * self.timed[0][0]

    def entry(self, digest: str) -> Entry:
        """The fastest tiling, or the default unless it is wrong or slower by more than GAIN. If none was timed, the
        first right one that is known, or the default."""
        name, timed = self.call.kernel.name, self.timed
        if not timed:
            return Entry(name, digest, self.untimed or self.tilings[0])
        best = min(timed, key=lambda pair: pair[0])
        if timed[0][1] == self.tilings[0] and best[0] > (1 - GAIN) * timed[0][0]:
            best = timed[0]
        return Entry(name, digest, best[1], tuple(timed), self.took)
