"""Counts of rows by outcome (kept, truncated, skipped, unusable), with positions, for summaries and errors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from wgpu_lora.data.json_values import canonical, row_digest
from wgpu_lora.data.source import BadRow, RowPosition, Source
from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import to_json
from wgpu_lora.formats.tokenizer.conversation_rows import TokenizedExample
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import count_noun, escape_unprintable, join_words

SKIPPED = "skipped_rows.jsonl"
# Places that a summary lists; bad rows that an error lists; bad rows kept to find the first ones, since rows of a block
# are not reported in order.
_NAMED, _SHOWN_BAD, _HELD = 3, 10, 1000


@dataclass
class RowTally:
    """A count of rows, with the positions of the first few."""

    count: int = 0
    positions: list[RowPosition] = field(default_factory=list)

    def add(self, position: RowPosition, count: int = 1) -> None:
        self.count += count
        if len(self.positions) < _NAMED and position not in self.positions:
            self.positions.append(position)

    def __str__(self) -> str:
        """The positions in brackets, such as ' (lines 3, 9, 12, ...)'."""
        if not self.positions:
            return ""
        ellipsis = ", ..." if self.count > len(self.positions) else ""
        return f" ({_at(self.positions)}{ellipsis})"


@dataclass
class RowCounts:
    """Counts of rows by outcome.

    examples: rows of the source. expanded: training rows made of them (several if a conversation gives one per turn).
    cut: rows truncated to the maximum length. too_long: rows dropped for their length.
    empty: examples skipped for an empty answer. empty_turns: turns of kept rows that are not trained on for that
    reason.
    unrendered: rows of which the chat template leaves something out, by what that is. untrained_turns: answers that are
        not trained on for that reason. remarks: rows whose text was changed, by how.
    untrained: other rows dropped because they have no trained tokens. truncated_away: those that lost them by
    truncation.
    repeated: kept examples that equal an earlier one. bad: unusable rows with the reason; with `keep_bad`, all of them
        and their content, else the first of `bad_count`. incomplete: whether reading ended before the last row, since
        there were too many of them.
    """

    source: Source
    keep_bad: bool = False
    examples: int = 0
    expanded: int = 0
    cut: RowTally = field(default_factory=RowTally)
    too_long: RowTally = field(default_factory=RowTally)
    empty: RowTally = field(default_factory=RowTally)
    empty_turns: RowTally = field(default_factory=RowTally)
    unrendered: dict[str, RowTally] = field(default_factory=dict)
    untrained_turns: RowTally = field(default_factory=RowTally)
    remarks: dict[str, RowTally] = field(default_factory=dict)
    untrained: RowTally = field(default_factory=RowTally)
    truncated_away: RowTally = field(default_factory=RowTally)
    repeated: RowTally = field(default_factory=RowTally)
    bad: list[tuple[RowPosition, BadRow]] = field(default_factory=list)
    bad_count: int = 0
    incomplete: bool = False
    _digest: Any = field(default_factory=hashlib.sha256)
    _row_keys: set[bytes] = field(default_factory=set)

    def add_row(self, position: RowPosition, row: dict[str, Any]) -> bytes | BadRow:
        """Add a row to the digest, and count repeated rows.

        Returns:
            The row's own digest; a BadRow if the row is not valid UTF-8.
        """
        try:
            text = canonical(row)
        except UnicodeEncodeError:
            return BadRow("a text has a lone surrogate; write the character out.", ascii(row)[:1000])
        except (ValueError, RecursionError):
            text = b"RowPlace(unit=%a, number=%a, line=%a)" % position  # what digests of earlier versions have
        self._digest.update(text + b"\n")
        key = row_digest(text)
        if key in self._row_keys:
            self.repeated.add(position)
        self._row_keys.add(key)
        return key

    def remark(self, position: RowPosition, text: str) -> None:
        """Count a row that is not trained on quite as it is."""
        self.remarks.setdefault(text, RowTally()).add(position)

    def note_text(self, position: RowPosition, example: TokenizedExample) -> None:
        """Count what the text of an example lacks, and how it was changed."""
        for name in sorted(example.unrendered):
            self.unrendered.setdefault(name, RowTally()).add(position)
        for text in sorted(example.remarks):
            self.remark(position, text)
        if example.untrained_turns:
            self.untrained_turns.add(position, example.untrained_turns)

    def add_bad(self, position: RowPosition, problem: BadRow) -> None:
        """Count an unusable row; without `keep_bad`, only the first ones are stored."""
        self.bad_count += 1
        if self.keep_bad or len(self.bad) < _HELD:
            self.bad.append((position, problem if self.keep_bad else BadRow(problem.reason)))

    def finish(self) -> str:
        """Finish after the last row; returns the SHA-256 of the source's bytes, or else of the rows."""
        self.bad.sort(key=lambda row: row[0].number)
        self._row_keys.clear()
        return self.source.digest() or self._digest.hexdigest()

    def refuse_bad(self, cure: str | None = None) -> None:
        """Raise UserError if there are unusable rows, with the first few and their count.

        Args:
            cure: what to do about them; by default, fix or skip them.
        """
        if not self.bad:
            return
        among = f" among the first {self.examples:,}" if self.incomplete else ""
        text = f"{self.source.display_name} has {count_noun(self.bad_count, 'row')}{among} that cannot be used"
        if self.source.is_sealed:
            raise UserError(
                f"{text}{self._bad_positions()}: mend the unsealed file, about which wgpu-lora data stats says more, "
                f"or use {flag('skip_bad_rows')}."
            )
        if len(self.bad) == 1:
            [(position, problem)] = self.bad
            raise UserError(f"{self.source.locate(position)}: {problem.reason}")
        by_reason: dict[str, list[RowPosition]] = {}
        for position, problem in self.bad[:_SHOWN_BAD]:
            by_reason.setdefault(problem.reason, []).append(position)
        lines = [f"{_at(positions)}: {escape_unprintable(reason)}" for reason, positions in by_reason.items()]
        if self.bad_count > _SHOWN_BAD:
            lines.append(f"and {self.bad_count - _SHOWN_BAD:,} more")
        cure = cure or f"fix them, or skip them with {flag('skip_bad_rows')}"
        raise UserError(f"{text}; {cure}:", lines)

    def refuse_nothing(self, max_length: int) -> None:
        """Raise UserError about why no row is left."""
        cut_count = self.truncated_away.count
        by_cut = f" ({cut_count:,} of them truncated at {max_length:,} tokens)" if cut_count else ""
        bad = (
            f" ({self.bad[0][0]}: {self.bad[0][1].reason.rstrip('.')})"
            if self.bad and not self.source.is_sealed
            else ""
        )
        kinds = {
            "that cannot be used" + bad: self.bad_count,
            "with an empty answer": self.empty.count,
            "with no token to train on" + by_cut: self.untrained.count,
            f"of more than {max_length:,} tokens": self.too_long.count,
        }
        counts = [f"{count:,} {kind}" for kind, count in kinds.items() if count]
        cure = "give rows that have answers" if self.expanded > cut_count + self.too_long.count else ""
        longer = f"raise {flag('max_length')}" if cut_count or self.too_long.count else ""
        raise UserError(
            f"{self.source.display_name} leaves nothing to train on: of {count_noun(self.expanded, 'row')}, "
            f"{join_words(counts)}; "
            f"{' or '.join(filter(None, (longer, cure)))}."
        )

    def summary(self, samples: str, max_length: int) -> str:
        """Counts of rows that were read and lost, as text. samples: what is trained on, such as `3 rows`."""
        whole = f"{self.source.name}: {count_noun(self.examples, 'example')}, {samples}"
        return ", ".join([whole, *self.outcomes(max_length)])

    def outcomes(self, max_length: int) -> list[str]:
        """Counts of rows that were skipped, cut or changed, as texts."""
        parts = []
        if self.cut.count:
            parts.append(f"{self.cut.count:,} truncated at {max_length:,} tokens{self.cut}")
        if self.too_long.count:
            parts.append(f"{self.too_long.count:,} dropped as longer than {max_length:,} tokens{self.too_long}")
        if self.empty.count:
            parts.append(f"{self.empty.count:,} skipped for an empty answer{self.empty}")
        if self.empty_turns.count:
            parts.append(f"{count_noun(self.empty_turns.count, 'empty turn')} not trained on{self.empty_turns}")
        for part, tally in self.unrendered.items():
            parts.append(f"the chat template leaves out {part} of {count_noun(tally.count, 'row')}{tally}")
        if self.untrained_turns.count:
            parts.append(
                f"{count_noun(self.untrained_turns.count, 'such answer')} not trained on{self.untrained_turns}"
            )
        for remark, tally in self.remarks.items():
            parts.append(f"{remark}{tally}")
        if self.untrained.count:
            by_cut = f", {self.truncated_away.count:,} of them by truncation" if self.truncated_away.count else ""
            parts.append(f"{self.untrained.count:,} dropped with nothing to train on{by_cut}{self.untrained}")
        if self.repeated.count:
            verb = "repeats" if self.repeated.count == 1 else "repeat"
            parts.append(f"{self.repeated.count:,} {verb} an earlier row{self.repeated}")
        if self.bad:
            parts.append(f"{count_noun(self.bad_count, 'bad row')} skipped{self._bad_positions()}")
        return parts

    def _bad_positions(self) -> RowTally:
        return RowTally(self.bad_count, [position for position, _ in self.bad[:_NAMED]])


def skipped_rows(accounts: Sequence[RowCounts]) -> bytes | None:
    """The content of `skipped_rows.jsonl`: the bad rows; None if there are none.

    A line has the source, the position, the reason, and the row as `content`, or its text if it cannot be parsed.
    """
    lines = [
        _skipped_row_line(
            {"data": account.source.path, position.unit: position.number, "reason": problem.reason}, problem.content
        )
        for account in accounts
        for position, problem in account.bad
    ]
    return ("\n".join(lines) + "\n").encode() if lines else None


def _skipped_row_line(values: dict[str, Any], content: Any) -> str:
    try:
        return to_json({**values, "content": content}, default=repr)
    except RecursionError:  # too deep to be written
        return to_json({**values, "content": None})


def _at(positions: Sequence[RowPosition]) -> str:
    """`line 3`; `lines 3, 9`; `rows 3 (line 5), 4 (line 9)`."""
    first, *rest = positions
    unit = first.unit + ("s" if rest else "")
    return unit + ", ".join([str(first).removeprefix(first.unit), *(str(p).removeprefix(p.unit + " ") for p in rest)])
