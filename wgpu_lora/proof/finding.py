"""The outcome of a check, and of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
LEFT_OUT = "left out by --only"
PROVEN, REFUTED, OPEN = "proven", "refuted", "open"  # refuted: a check failed


class NotRun(Exception):
    """A check cannot be carried out here; the message says why."""


class Finding:
    """What a check finds while it runs: its figures, and its faults, any of which makes it fail."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.faults: list[str] = []

    def expect(self, holds: object, fault: str) -> None:
        """Note the fault unless the condition holds; conditions are written so that NaN does not satisfy them."""
        if not holds:
            self.faults.append(fault)


@dataclass(frozen=True)
class Check:
    """The outcome of a check, the reason in a sentence, and the figures that it is based on."""

    number: int
    name: str
    status: str
    seconds: float
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """All nine checks, by number. code: 1 if one failed or none passed.

    devices: what they ran on, as in `devices.described`. lacking: why --require-discrete is not met.
    """

    checks: list[Check]
    directory: Path
    devices: str = ""
    lacking: str | None = None

    def count(self, status: str) -> int:
        return sum(check.status == status for check in self.checks)

    @property
    def proven(self) -> bool:
        return not self.lacking and self.count(PASSED) == len(self.checks)

    @property
    def code(self) -> int:
        return int(self.outcome == REFUTED or not self.count(PASSED))

    @property
    def outcome(self) -> str:
        if self.proven:
            return PROVEN
        return REFUTED if self.lacking or self.count(FAILED) else OPEN

    @property
    def verdict(self) -> str:
        if self.proven:
            return f"Proven: all of training and inference happened on wgpu, without CUDA, on {self.devices}."
        numbers: dict[str, list[str]] = {FAILED: [], NOT_RUN: [], LEFT_OUT: []}
        for check in self.checks:
            numbers.setdefault(LEFT_OUT if check.reason == LEFT_OUT else check.status, []).append(str(check.number))
        passed = numbers.pop(PASSED, [])
        reasons = [self.lacking] if self.lacking else []
        reasons += [f"{status}: {', '.join(found)}" for status, found in numbers.items() if found]
        partly = self.outcome == OPEN and numbers[LEFT_OUT] and passed
        on = f" on {self.devices}" if self.devices else ""
        return (
            f"{'Partly checked' if partly else 'Not proven'}: {len(passed)} of {len(self.checks)} checks passed{on}; "
            f"{'; '.join(reasons)}."
        )
