"""The outcome of a check, and of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
LEFT_OUT = "left out by --only"
PROVEN, REFUTED, OPEN = "proven", "refuted", "open"  # refuted: a check failed

FACTS = ("name", "driver", "backend")  # of a device
Facts = Mapping[str, Any]


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

    def expect_device(self, index: int, listed: Facts, who: str, said: Facts, names: Sequence[str] = FACTS) -> None:
        """Note a fault for each named fact of a device that differs from the list of devices."""
        for name in names:
            fault = f"{who} says {name} {said[name]}, but device {index} has {listed[name]}"
            self.expect(said[name] == listed[name], fault)


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

    devices: what they ran on, see `run.on_devices`. lacking: why --require-discrete is not met.
    """

    checks: list[Check]
    directory: Path
    devices: str = ""
    lacking: str | None = None

    def numbers(self, kind: str) -> list[str]:
        """The numbers of the checks with a status; those that --only leaves out have LEFT_OUT instead of theirs."""
        return [str(c.number) for c in self.checks if kind == (LEFT_OUT if c.reason == LEFT_OUT else c.status)]

    @property
    def outcome(self) -> str:
        if self.lacking or self.numbers(FAILED):
            return REFUTED
        return PROVEN if len(self.numbers(PASSED)) == len(self.checks) else OPEN

    @property
    def proven(self) -> bool:
        return self.outcome == PROVEN

    @property
    def code(self) -> int:
        return int(self.outcome == REFUTED or not self.numbers(PASSED))

    @property
    def verdict(self) -> str:
        if self.proven:
            return f"Proven: all training and inference ran on wgpu, without CUDA, on {self.devices}."
        passed, left_out = self.numbers(PASSED), self.numbers(LEFT_OUT)
        reasons = [f"{kind}: {', '.join(n)}" for kind in (FAILED, NOT_RUN, LEFT_OUT) if (n := self.numbers(kind))]
        verdict = "Partly checked" if self.outcome == OPEN and left_out and passed else "Not proven"
        on = f" on {self.devices}" if self.devices else ""
        told = "; ".join([self.lacking, *reasons] if self.lacking else reasons)
        return f"{verdict}: {len(passed)} of {len(self.checks)} checks passed{on}; {told}."
