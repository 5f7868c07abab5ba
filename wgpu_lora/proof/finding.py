"""What became of a check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


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


class NotRun(Exception):
    """A check cannot be done here; the message says why."""


class ChildFailed(Exception):
    """A child process ended other than it should."""
