"""What became of every row: which were cut, left out or not understood, and what a person is told of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.bounded import printable
from wgpu_lora.data.source import Place, Problem, Source
from wgpu_lora.errors import UserError
from wgpu_lora.names.naming import flag
from wgpu_lora.strict_json import to_json
from wgpu_lora.words import counted, listed

SKIPPED = "skipped_rows.jsonl"
# Places that a summary names; bad rows that an error does, and of how many these are the first: those of a block of
# rows come in no order.
_NAMED, _TOLD, _HELD = 3, 10, 1000


@dataclass
class Tally:
    """A count of rows, and the places of the first."""

    count: int = 0
    places: list[Place] = field(default_factory=list)

    def add(self, place: Place, count: int = 1) -> None:
        self.count += count
        if len(self.places) < _NAMED and place not in self.places:
            self.places.append(place)

    def __str__(self) -> str:
        """Where they are, in brackets: '(lines 3, 9, 12, ...)'."""
        if not self.places:
            return ""
        more = ", ..." if self.count > len(self.places) else ""
        return f" ({_at(self.places)}{more})"


@dataclass
class Account:
    """examples: rows of the source. expanded: rows that they gave (more, where a conversation gives one for each turn).

    cut: rows kept, cut to the greatest length. too_long: rows dropped for their length.
    empty: examples left out since their answers are empty. silent: turns that are not learnt for that, of rows kept.
    untrained: other rows dropped because nothing is learnt in them. lost_by_cut: those of them that the cut left so.
    repeated: examples that say what an earlier one says, and are kept. bad: rows that cannot be used, and why; with
        `keep_bad`, all of them and what they are, else the first of `bad_count`.
    """

    source: Source
    keep_bad: bool = False
    examples: int = 0
    expanded: int = 0
    cut: Tally = field(default_factory=Tally)
    too_long: Tally = field(default_factory=Tally)
    empty: Tally = field(default_factory=Tally)
    silent: Tally = field(default_factory=Tally)
    untrained: Tally = field(default_factory=Tally)
    lost_by_cut: Tally = field(default_factory=Tally)
    repeated: Tally = field(default_factory=Tally)
    bad: list[tuple[Place, Problem]] = field(default_factory=list)
    bad_count: int = 0
    _digest: Any = field(default_factory=hashlib.sha256)
    _seen: set[bytes] = field(default_factory=set)

    def note(self, place: Place, row: dict[str, Any]) -> Problem | None:
        """Takes a row into the digest, and counts it if it stood there before; a Problem where it cannot be written."""
        try:
            text = json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=repr).encode()
        except UnicodeEncodeError:
            return Problem("a text holds half of a surrogate pair; write the character out.", ascii(row)[:1000])
        except (ValueError, RecursionError):
            text = repr(place).encode()
        self._digest.update(text + b"\n")
        key = hashlib.blake2b(text, digest_size=12).digest()
        if key in self._seen:
            self.repeated.add(place)
        self._seen.add(key)
        return None

    def add_bad(self, place: Place, problem: Problem) -> None:
        """Counts a row that cannot be used; without `keep_bad` no more are held than are told of."""
        self.bad_count += 1
        if self.keep_bad or len(self.bad) < _HELD:
            self.bad.append((place, problem if self.keep_bad else Problem(problem.reason)))

    def close(self) -> str:
        """Puts things in order when all rows are read; SHA-256 of what they come from, else of the rows themselves."""
        self.bad.sort(key=lambda found: found[0].number)
        self._seen.clear()
        return self.source.digest() or self._digest.hexdigest()

    def refuse_bad(self, cure: str | None = None) -> None:
        """Raises UserError where a row cannot be used: one by itself, else the first ones and how many there are.

        Args:
            cure: what to do with them, else it is said how a run goes on without them.
        """
        if not self.bad:
            return
        if len(self.bad) == 1:
            [(place, problem)] = self.bad
            raise UserError(f"{self.source.where(place)}: {problem.reason}")
        by_reason: dict[str, list[Place]] = {}
        for place, problem in self.bad[:_TOLD]:
            by_reason.setdefault(problem.reason, []).append(place)
        told = [f"{_at(places)}: {printable(reason)}" for reason, places in by_reason.items()]
        if self.bad_count > _TOLD:
            told.append(f"and {self.bad_count - _TOLD:,} more")
        what = f"{self.source.called} has {counted(self.bad_count, 'row')} that cannot be used"
        cure = cure or f"mend them, or set them aside with {flag('skip_bad_rows')}"
        raise UserError(f"{what}; {cure}:", told)

    def refuse_nothing(self, max_length: int) -> None:
        """Raises UserError: no row is left; why."""
        lost = self.lost_by_cut.count
        by_cut = f" ({lost:,} of them after the cut at {max_length:,} tokens)" if lost else ""
        bad = f" ({self.bad[0][0]}: {self.bad[0][1].reason.rstrip('.')})" if self.bad else ""
        kinds = {
            "that cannot be used" + bad: self.bad_count,
            "with an empty answer": self.empty.count,
            "with no token to learn" + by_cut: self.untrained.count,
            f"of more than {max_length:,} tokens": self.too_long.count,
        }
        told = [f"{count:,} {what}" for what, count in kinds.items() if count]
        cure = "give rows that have answers" if self.expanded > lost + self.too_long.count else ""
        longer = f"raise {flag('max_length')}" if lost or self.too_long.count else ""
        raise UserError(
            f"{self.source.called} leaves nothing to train on: of {counted(self.expanded, 'row')}, {listed(told)}; "
            f"{' or '.join(filter(None, (longer, cure)))}."
        )

    def summary(self, rows: int, max_length: int) -> str:
        """What was read and what was lost, as a part of a line."""
        parts = [f"{self.source.name}: {counted(self.examples, 'example')}, {counted(rows, 'row')}"]
        if self.cut.count:
            parts.append(f"{self.cut.count:,} cut at {max_length:,} tokens{self.cut}")
        if self.too_long.count:
            parts.append(f"{self.too_long.count:,} dropped as longer than {max_length:,} tokens{self.too_long}")
        if self.empty.count:
            parts.append(f"{self.empty.count:,} left out for an empty answer{self.empty}")
        if self.silent.count:
            parts.append(f"{counted(self.silent.count, 'empty turn')} not learnt{self.silent}")
        if self.untrained.count:
            by_cut = f", {self.lost_by_cut.count:,} of them by the cut" if self.lost_by_cut.count else ""
            parts.append(f"{self.untrained.count:,} dropped with nothing to learn{by_cut}{self.untrained}")
        if self.repeated.count:
            verb = "repeats" if self.repeated.count == 1 else "repeat"
            parts.append(f"{self.repeated.count:,} {verb} an earlier row{self.repeated}")
        if self.bad:
            first = Tally(self.bad_count, [place for place, _ in self.bad[:_NAMED]])
            parts.append(f"{counted(self.bad_count, 'bad row')} skipped{first}")
        return ", ".join(parts)


def write_skipped(directory: Path, accounts: Sequence[Account]) -> Path | None:
    """Sets the bad rows aside in a directory's `skipped_rows.jsonl`, and returns its path; None without any.

    A line has what the row is in, its place, the reason, and the row as content, or its text where it is none.
    Raises OSError.
    """
    path = directory / SKIPPED
    lines = [
        _aside({"data": account.source.path, place.unit: place.number, "reason": problem.reason}, problem.content)
        for account in accounts
        for place, problem in account.bad
    ]
    if not lines:
        path.unlink(missing_ok=True)
        return None
    write_bytes_atomic(path, ("\n".join(lines) + "\n").encode())
    return path


def _aside(told: dict[str, Any], content: Any) -> str:
    try:
        return to_json({**told, "content": content}, default=repr)
    except RecursionError:  # so deep that the reason is all that can be said
        return to_json({**told, "content": None})


def _at(places: Sequence[Place]) -> str:
    """`line 3`; `lines 3, 9`; `rows 3 (line 5), 4 (line 9)`."""
    first, *rest = places
    unit = first.unit + ("s" if rest else "")
    return unit + ", ".join([str(first).removeprefix(first.unit), *(str(p).removeprefix(p.unit + " ") for p in rest)])
