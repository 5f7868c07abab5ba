"""What became of the rows, for report.json."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

EXACT, NORMALIZED, NEAR = "exact", "normalized", "near"
_SHOWN, _REASONS = 20, 100  # duplicates and reasons that are listed
_OTHERS = "other reasons"
_VARYING = re.compile(r"'(?:[^'\\]|\\.)*'|(?<!UTF-)\d[\d,]*")


@dataclass
class OfInput:
    """Counts of one input. out: rows that were written."""

    name: str
    rows: int = 0
    out: int = 0
    rejected: int = 0
    duplicates: int = 0


@dataclass
class Counts:
    """Counts of all inputs.

    rows: read. formats: rows written, by the required keys of their format. reasons: rejected rows, by reason without
    its details where they differ. edited: rows from which system messages or reasoning were removed. dropped_columns:
    values that JSON cannot hold, by column. ungrouped: examples without the column that rows are held out by.
    """

    inputs: list[OfInput] = field(default_factory=list)
    _whole: dict[str, str] = field(default_factory=dict)  # a reason with its details, if all rows have the same
    formats: Counter[str] = field(default_factory=Counter)
    duplicates: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    edited: Counter[str] = field(default_factory=Counter)
    dropped_columns: Counter[str] = field(default_factory=Counter)
    ungrouped: int = 0
    shown: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.inputs)

    @property
    def rejected(self) -> int:
        return sum(one.rejected for one in self.inputs)

    def reject(self, reason: str) -> None:
        self.inputs[-1].rejected += 1
        kind = _VARYING.sub(lambda found: found[0] if found[0].startswith("'") else "N", reason)
        if kind not in self.reasons and len(self.reasons) >= _REASONS:
            kind = reason = _OTHERS
        self.reasons[kind] += 1
        if self._whole.setdefault(kind, reason) != reason:
            self._whole[kind] = kind

    def repeat(self, how: str, this: dict[str, Any], first: dict[str, Any], alike: float | None = None) -> None:
        """Count a duplicate; the first ones are listed."""
        self.inputs[-1].duplicates += 1
        self.duplicates[how] += 1
        if len(self.shown) < _SHOWN:
            same = {} if alike is None else {"similarity": round(alike, 3)}
            self.shown.append({"kind": how, **same, "row": this, "of": first})

    def facts(self) -> dict[str, Any]:
        repeated = {kind: self.duplicates[kind] for kind in (EXACT, NORMALIZED, NEAR)}
        return {
            "rows": {
                "in": self.rows,
                "out": sum(one.out for one in self.inputs),
                "rejected": self.rejected,
                "duplicates": sum(repeated.values()),
            },
            "duplicates": repeated,
            "formats": _ordered(self.formats),
            "reasons": _ordered(Counter({self._whole[kind]: count for kind, count in self.reasons.items()})),
            "edited": _ordered(self.edited),
            "dropped_columns": _ordered(self.dropped_columns),
            "inputs": [vars(one) for one in self.inputs],
            "duplicates_shown": self.shown,
        }


def _ordered(counter: Counter[str]) -> dict[str, int]:
    """The most common first; ties by name."""
    return dict(sorted(counter.items(), key=lambda item: (-item[1], item[0])))
