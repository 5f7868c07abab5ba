"""What became of a check, and of all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
LEFT_OUT = "left out by --only"
PROVEN, REFUTED, OPEN = "proven", "refuted", "open"  # REFUTED: something that was checked is not as it has to be


@dataclass(frozen=True)
class Finding:
    """status, the reason for it in a sentence, and the figures that it rests on."""

    status: str
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, faults: list[str], reason: str, figures: dict[str, Any]) -> Finding:
        """Failed where there is any fault."""
        return cls(FAILED, "; ".join(faults), figures) if faults else cls(PASSED, reason, figures)


@dataclass(frozen=True)
class Check:
    """A check that has been done, or could not be."""

    number: int
    name: str
    seconds: float
    finding: Finding

    def as_dict(self) -> dict[str, Any]:
        finding = self.finding
        return {
            "number": self.number,
            "name": self.name,
            "status": finding.status,
            "seconds": round(self.seconds, 2),
            "reason": finding.reason,
            "figures": finding.figures,
        }


@dataclass(frozen=True)
class Result:
    """checks: all nine, by number. code: 1 where one failed, or none passed.

    devices: what they were done on, as `on_devices` says it. lacking: what --require-discrete did not get.
    """

    checks: list[Check]
    directory: Path
    devices: str = ""
    lacking: str | None = None

    def count(self, status: str) -> int:
        return sum(check.finding.status == status for check in self.checks)

    @property
    def proven(self) -> bool:
        return not self.lacking and self.count(PASSED) == len(self.checks)

    @property
    def code(self) -> int:
        return int(bool(self.lacking or self.count(FAILED)) or not self.count(PASSED))

    @property
    def outcome(self) -> str:
        if self.proven:
            return PROVEN
        return REFUTED if self.lacking or self.count(FAILED) else OPEN

    @property
    def verdict(self) -> str:
        if self.proven:
            return f"Proven: all of training and inference happened on wgpu, without CUDA, on {self.devices}."
        said, numbers = [self.lacking] if self.lacking else [], dict[str, list[str]]()
        for check in self.checks:
            left_out = check.finding.reason == LEFT_OUT
            numbers.setdefault(LEFT_OUT if left_out else check.finding.status, []).append(str(check.number))
        said += [
            f"{status}: {', '.join(numbers[status])}" for status in (FAILED, NOT_RUN, LEFT_OUT) if status in numbers
        ]
        on = f" on {self.devices}" if self.devices else ""
        partly = self.outcome == OPEN and LEFT_OUT in numbers and self.count(PASSED)
        passed = f"{self.count(PASSED)} of {len(self.checks)} checks passed{on}"
        return f"{'Partly checked' if partly else 'Not proven'}: {passed}; {'; '.join(said)}."


def finite_or_nan(value: float | None) -> float:
    """A number of a child's result, which has null for one that is not finite."""
    return math.nan if value is None else value


class NotRun(Exception):
    """A check cannot be done here; the message says why."""
