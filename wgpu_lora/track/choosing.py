"""Choosing entries of the run log: by filters, and by id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase

from wgpu_lora.errors import UserError
from wgpu_lora.names.naming import flag
from wgpu_lora.track.entry import Entry

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
LAST = "last"


@dataclass(frozen=True)
class Filter:
    """What an entry must have; None is anything.

    name: a part of the name, of the adapter's name or of the goal, or a pattern with *. since: UTC.
    """

    status: str | None = None
    kind: str | None = None
    objective: str | None = None
    name: str | None = None
    since: datetime | None = None

    def holds(self, entry: Entry) -> bool:
        return (
            self.status in (None, entry.status)
            and (self.kind is None or self.kind in (entry.kind, entry.kind.partition(" ")[0]))
            and self.objective in (None, entry.objective)
            and (
                self.name is None or any(_matches(self.name, text) for text in (entry.name, entry.adapter, entry.goal))
            )
            and (self.since is None or date_of(entry) >= self.since)
        )


def date_of(entry: Entry) -> datetime:
    """When a run began; the beginning of time if its entry does not say so."""
    try:
        found = datetime.fromisoformat(entry.date)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _matches(pattern: str, text: str | None) -> bool:
    if text is None:
        return False
    pattern, text = pattern.lower(), text.lower()
    return fnmatchcase(text, pattern) if "*" in pattern else pattern in text


def since(text: str, at: datetime | None = None) -> datetime:
    """A date (2026-11-22, 2026-11-22T14:00, in the system's time zone), or a time before `at` (30m, 12h, 7d, 2w).

    at: now, if not given.

    Raises:
        UserError: it is neither.
    """
    at = at or datetime.now(UTC)
    try:
        if found := re.fullmatch(r"(\d{1,6})([mhdw])", text.strip()):
            return at - timedelta(**{UNITS[found[2]]: int(found[1])})
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UserError(
            f"{flag('since')} must be a date such as 2026-11-22 or a time ago such as 12h or 7d, not {text!r:.60}."
        ) from None


def find(entries: Sequence[Entry], name: str) -> Entry:
    """The entry of an id, of the beginning or end of one, or the last one.

    Raises:
        UserError: there is none, or there are several.
    """
    if name == LAST and entries:
        return entries[-1]
    exact = [entry for entry in entries if entry.id == name]
    found = exact or [entry for entry in entries if name and (entry.id.startswith(name) or entry.id.endswith(name))]
    if len(found) > 1:
        some = ", ".join(entry.id for entry in found[:3])
        raise UserError(f"{name!r:.60} stands for {len(found)} runs: give more of the id ({some}).")
    if not found:
        raise UserError(f"There is no run {name!r:.60} in the run log: 'wgpu-lora runs' lists them.")
    return found[0]
