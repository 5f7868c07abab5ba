"""Which part of a step each device of a data-parallel run computes: in proportion to measured speed."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

KEPT = 32  # steps that shares stay as they are, so that results can be explained
SETTLING = 4  # steps after which those of other members are adapted first
RECENT = 8  # parts whose median is a member's speed
LATE, GRACE = 4.0, 2.0  # a part is late after this multiple of its usual time, plus seconds
FIRST, FIRST_GRACE = 10.0, 30.0  # likewise before the member was timed: multiple of the leader's time, plus seconds

Span = tuple[int, int]  # [begin, end) among the samples of a step


def divided(sizes: Sequence[int], shares: Sequence[float]) -> list[Span]:
    """A span for each member, in order, with about its share of the tokens; the last ends with the step.

    Spans follow each other, so that micro-batches are cut at most once per member, and are cut between samples only.
    """
    ends = [0, *itertools.accumulate(sizes)]
    spans, begin, share = list[Span](), 0, 0.0
    for own in shares[:-1]:
        share += own
        wanted = ends[-1] * share / sum(shares)
        end = min(range(begin, len(ends)), key=lambda i: abs(ends[i] - wanted))
        spans.append((begin, end))
        begin = end
    return [*spans, (begin, len(sizes))]


@dataclass
class Shares:
    """The shares of members, by number; the leader is 0."""

    _seconds: dict[int, deque[float]] = field(default_factory=dict)  # per token, of each member's recent parts
    _kept: dict[int, float] = field(default_factory=dict)
    _left: int = 0  # steps until the shares are computed again
    _parts: set[int] = field(default_factory=set)  # members that had a part since they were computed

    def of(self, members: Sequence[int]) -> list[float]:
        """The shares of the next step, which sum to 1."""
        if list(self._kept) != list(members):
            self._kept, self._left = self._computed(members), SETTLING
        elif not self._left:
            for idle in self._kept.keys() - self._parts:  # its speed may have changed since
                self._seconds[idle] = deque((value / 2 for value in self._seconds.get(idle, ())), RECENT)
            self._kept, self._left = self._computed(members), KEPT
            self._parts = set()
        self._left -= 1
        return list(self._kept.values())

    def _computed(self, members: Sequence[int]) -> dict[int, float]:
        speeds = {member: 1 / statistics.median(known) for member in members if (known := self._seconds.get(member))}
        usual = statistics.fmean(speeds.values()) if speeds else 1.0
        found = {member: speeds.get(member, usual) for member in members}
        return {member: speed / sum(found.values()) for member, speed in found.items()}

    def took(self, member: int, tokens: int, seconds: float) -> None:
        """A member has computed a part of this many tokens."""
        self._seconds.setdefault(member, deque(maxlen=RECENT)).append(max(seconds, 1e-9) / max(tokens, 1))
        self._parts.add(member)

    def forget(self, member: int) -> None:
        """A member is another process or device now."""
        self._seconds.pop(member, None)

    def patience(self, member: int, tokens: int, own: float) -> float:
        """Seconds after which a part of `tokens` is late, if the leader's own took `own` seconds."""
        known = self._seconds.get(member)
        if not known:
            return FIRST * own + FIRST_GRACE
        return LATE * statistics.median(known) * tokens + GRACE
