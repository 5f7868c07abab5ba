"""Prepare files of rows: read, edit, check, remove duplicates, split and write, in constant memory."""

from __future__ import annotations

import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.data.compressed_files import position
from wgpu_lora.data.curation import row_edits
from wgpu_lora.data.curation.curation_files import (
    REJECTED,
    REPORT,
    SCHEMA,
    Inputs,
    LineWriter,
    encoded,
    find_inputs,
    matches,
    refuse_output,
)
from wgpu_lora.data.curation.curation_options import Preparation
from wgpu_lora.data.curation.deduplication import EXACT, NEAR, NORMALIZED, Duplicates, duplicates
from wgpu_lora.data.curation.row_edits import (
    EXAMPLE,
    FILES,
    ROWS,
    TRAIN,
    VALID,
    Read,
    Row,
    examples_only,
    json_row,
    rejection_reason,
)
from wgpu_lora.data.json_values import canonical, row_digest
from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.data.source import BadRow, NoRowsError, RowPosition
from wgpu_lora.data.validation_split import row_key, validation_mask
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import new_directory, write_bytes_atomic
from wgpu_lora.files.json_files import to_json
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.names.text import count_noun

_REPORT_INTERVAL = 0.1  # seconds between calls of `watch`
_SPOOL, _SEEN = ".spool", ".seen"  # temporary files


@dataclass(frozen=True)
class CurationProgress:
    """bytes read, of all bytes of the files; rows read; the name of the current input."""

    bytes: int
    total: int
    rows: int
    name: str


Watch = Callable[[CurationProgress], None]


def prepare_files(
    names: Sequence[str], output: Path, options: Preparation | None = None, watch: Watch = lambda progress: None
) -> dict[str, Any]:
    """Prepare the rows of files, folders, glob patterns and datasets, and write them into a new directory.

    The directory has the files of `row_edits.FILES` that have rows, `valid.jsonl` with --validation-split,
    `rejected.jsonl` if rows were rejected, and `report.json`. The same inputs and options give the same bytes.

    Returns:
        The contents of report.json.

    Raises:
        UserError: an input cannot be read, no row is left, or the output cannot be written; nothing is written then.
    """
    options = options or Preparation()
    refuse_output(output, options.overwrite)  # before anything is read
    inputs = find_inputs(names, output, options.exclude)
    for pattern in options.preferences_from:
        if not any(matches(source.path, [pattern]) for source in inputs.sources):
            raise UserError(f"{setting('preferences_from', pattern)} matches none of the inputs: check the pattern.")
    with new_directory(output, flag("output"), replace=True) as directory:
        refuse_output(output, options.overwrite)  # a killed process may have moved it away
        facts = Curation(inputs, options, directory, watch).run()
        text = to_json(facts, indent=1, ensure_ascii=False) + "\n"
        write_bytes_atomic(directory / REPORT, text.encode())
        refuse_output(output, options.overwrite)  # a program without our locks may have made it
    return facts


class Curation:
    def __init__(self, inputs: Inputs, options: Preparation, directory: Path, watch: Watch) -> None:
        self.inputs, self.options, self.directory, self.watch = inputs, options, directory, watch
        self.counts, self.notes = Counts(), list(inputs.notes)
        self.spool = _SPOOL if options.validation_split is not None else TRAIN
        names = {kind: self.spool if kind == EXAMPLE else name for kind, name in FILES.items()}
        self.files = {kind: LineWriter(directory / name) for kind, name in names.items()}
        self.rejected = LineWriter(directory / REJECTED)
        self.groups = array("Q")
        self._last_report, self._read = time.monotonic(), 0

    def run(self) -> dict[str, Any]:
        with ExitStack() as stack:
            repeats = stack.enter_context(duplicates(self.directory / _SEEN, self.options))
            for lines in (*self.files.values(), self.rejected):
                stack.callback(lines.close)
            for number in range(len(self.inputs.sources)):
                self._input(number, repeats)
        outputs = self._outputs()
        self._check(outputs)
        return {
            "schema": SCHEMA,
            **self.counts.facts(),
            "files": {name: lines.facts() for name, lines in outputs.items()},
            "options": {name: value for name, value in asdict(self.options).items() if name != "overwrite"},
            "notes": self.notes,
        }

    # -- reading -------------------------------------------------------------------------------------------------------

    def _input(self, number: int, repeats: Duplicates) -> None:
        source, path = self.inputs.sources[number], self.inputs.paths[number]
        self.counts.inputs.append(InputCounts(source.path))
        patterns = self.options.preferences_from
        formats = ROWS if not patterns or matches(source.path, patterns) else examples_only(patterns)
        empty = path is not None and not self.inputs.sizes[number]
        try:
            for position, row in () if empty else source.rows(ROWS):
                self.counts.inputs[-1].rows += 1
                self._row(number, position, row, formats, repeats)
                self._tell(number)
        except NoRowsError:
            empty = True
        if empty:
            self.notes.append(f"{source.path} has no rows")
        self.notes += source.notes
        self._read += self.inputs.sizes[number]
        self._tell(number, last=True)

    def _tell(self, number: int, last: bool = False) -> None:
        now = time.monotonic()
        if now - self._last_report < _REPORT_INTERVAL and not last:
            return
        self._last_report, path = now, self.inputs.paths[number]
        read = self._read + (0 if last or path is None else position(path) or 0)
        self.watch(CurationProgress(read, sum(self.inputs.sizes), self.counts.rows, self.inputs.sources[number].name))

    def _row(
        self, number: int, position: RowPosition, row: Row | BadRow, formats: RowFormats[Read], repeats: Duplicates
    ) -> None:
        if isinstance(row, BadRow):
            self._reject(position, row.reason, row.content)
            return
        original = row
        try:
            row, edited = self._edited(row)
            read = formats.read(row)
            options = self.options
            wrong = rejection_reason(read, options.enable_thinking, options.drop_thinking, options.max_characters)
            row, line = self._encoded(row)
            repeated = None if wrong else repeats.add(read, number, position.number)
        except UserError as error:
            wrong = str(error)
        except UnicodeEncodeError:
            wrong = "a text has a lone surrogate; write the character out."
        except RecursionError:
            wrong = "nested too deeply to read; a row needs only a few levels."
        if wrong:
            self._reject(position, wrong, original)
            return
        if repeated:
            first = self._position(repeated.source, repeated.number)
            self.counts.repeat(repeated.kind, self._position(number, position.number), first, repeated.alike)
            return
        self.files[read.kind].add(line)
        self.counts.inputs[-1].out += 1
        self.counts.formats[read.format] += 1
        self.counts.edited.update(edited)
        if read.kind == EXAMPLE and self.options.validation_split is not None:
            self.groups.append(self._group(row))

    def _edited(self, row: Row) -> tuple[Row, list[str]]:
        """The row after the edits, and what was removed."""
        row, edited = row_edits.listed_messages(row), []
        if self.options.strip_system:
            row, count = row_edits.without_system(row)
            edited += ["system messages"] * bool(count)
        if self.options.drop_thinking:
            row, count = row_edits.without_reasoning(row)
            edited += ["reasoning"] * bool(count)
        return row, edited

    def _encoded(self, row: Row) -> tuple[Row, bytes]:
        try:
            return row, encoded(row)
        except TypeError:
            row, columns = json_row(row, ROWS.columns)
            self.counts.dropped_columns.update(columns)
            return row, encoded(row)

    def _group(self, row: Row) -> int:
        """The key of the rows that a row is held out with: those of its group, or those equal to it."""
        name = self.options.group_by
        if name is None:
            return row_key(row_digest(canonical(row)))
        value = row.get(name)
        if value is None:
            self.counts.ungrouped += 1
            return row_key(row_digest(canonical(row)))
        return row_key(row_digest(b"group " + canonical(value)))

    def _reject(self, position: RowPosition, reason: str, row: Any) -> None:
        record = {"file": self.counts.inputs[-1].name, **_at(position), "reason": reason}
        try:
            text = to_json({**record, "content": row}, default=repr)
        except RecursionError:  # too deep to be written
            text = to_json({**record, "content": None})
        self.rejected.add(text.encode() + b"\n")
        self.counts.reject(reason)

    def _position(self, source: int, number: int) -> dict[str, Any]:
        return {"file": self.counts.inputs[source].name, "number": number}

    # -- writing -------------------------------------------------------------------------------------------------------

    def _outputs(self) -> dict[str, LineWriter]:
        """The files with rows, by name; examples are split first."""
        by_name = {FILES[kind]: lines for kind, lines in self.files.items()}
        if self.options.validation_split is not None:
            train, valid = self._split(by_name.pop(TRAIN).rows)
            by_name = {TRAIN: train, VALID: valid, **by_name}
        return {name: lines for name, lines in {**by_name, REJECTED: self.rejected}.items() if lines.rows}

    def _split(self, rows: int) -> tuple[LineWriter, LineWriter]:
        share, name = self.options.validation_split, self.options.group_by
        if not rows:
            self._refuse_nothing(f"{setting('validation_split', share)} has nothing to split: no row is an example")
        if name is not None and self.counts.ungrouped == rows:
            raise UserError(f"No row has {name!r}: give {flag('group_by')} the name of a column, such as 'id'.")
        if self.counts.ungrouped:
            self.notes.append(
                f"{count_noun(self.counts.ungrouped, 'row')} without {name!r}: each is a group of its own"
            )
        keys, self.groups = np.frombuffer(self.groups, np.uint64), array("Q")
        valid = validation_mask(keys, share or 0.0, self.options.seed)
        del keys
        train, heldout = LineWriter(self.directory / TRAIN), LineWriter(self.directory / VALID)
        spool = self.directory / self.spool
        with spool.open("rb") as file:
            for line, is_heldout in zip(file, valid, strict=True):
                (heldout if is_heldout else train).add(line)
        for lines in (train, heldout):
            lines.close()
        spool.unlink()
        return train, heldout

    def _check(self, outputs: dict[str, LineWriter]) -> None:
        """Check that every row is somewhere, by the lines of the files."""
        rejected, repeated = self.rejected.rows, sum(self.counts.duplicates.values())
        out = sum(lines.rows for name, lines in outputs.items() if name != REJECTED)
        if not out:
            self._refuse_nothing("No row is left")
        result = out + rejected + repeated, sum(entry.out for entry in self.counts.inputs), self.counts.rejected
        if result != (self.counts.rows, out, rejected):
            raise RuntimeError(f"{self.counts.rows} rows were read, but {out}, {rejected} and {repeated} accounted for")

    def _refuse_nothing(self, problem: str) -> None:
        counts = self.counts
        repeated = sum(counts.duplicates.values())
        reasons = [f"{count:,} rejected: {reason}" for reason, count in counts.facts()["reasons"].items()][:5]
        reasons += [f"{repeated:,} removed as duplicates"] if repeated else []
        raise UserError(f"{problem}, of {count_noun(counts.rows, 'row')}; nothing was written.", reasons)


def _at(position: RowPosition) -> dict[str, Any]:
    """The position of a row: a line of text, or the number of a row, with its first line if it has one."""
    first = {} if position.line is None else {"line": position.line}
    return {position.unit: position.number, **first}


_SHOWN, _REASONS = 20, 100  # duplicates and reasons that are listed
_OTHER_REASONS = "other reasons"
_VARYING = re.compile(r"'(?:[^'\\]|\\.)*'|(?<!UTF-)\d[\d,]*")


@dataclass
class InputCounts:
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

    inputs: list[InputCounts] = field(default_factory=list)
    _whole: dict[str, str] = field(default_factory=dict)  # a reason with its details, if all rows have the same
    formats: Counter[str] = field(default_factory=Counter)
    duplicates: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    edited: Counter[str] = field(default_factory=Counter)
    dropped_columns: Counter[str] = field(default_factory=Counter)
    ungrouped: int = 0
    listed_duplicates: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(entry.rows for entry in self.inputs)

    @property
    def rejected(self) -> int:
        return sum(entry.rejected for entry in self.inputs)

    def reject(self, reason: str) -> None:
        self.inputs[-1].rejected += 1
        kind = _VARYING.sub(lambda match: match[0] if match[0].startswith("'") else "N", reason)
        if kind not in self.reasons and len(self.reasons) >= _REASONS:
            kind = reason = _OTHER_REASONS
        self.reasons[kind] += 1
        if self._whole.setdefault(kind, reason) != reason:
            self._whole[kind] = kind

    def repeat(self, kind: str, row: dict[str, Any], first: dict[str, Any], alike: float | None = None) -> None:
        """Count a duplicate; the first ones are listed."""
        self.inputs[-1].duplicates += 1
        self.duplicates[kind] += 1
        if len(self.listed_duplicates) < _SHOWN:
            similarity = {} if alike is None else {"similarity": round(alike, 3)}
            self.listed_duplicates.append({"kind": kind, **similarity, "row": row, "of": first})

    def facts(self) -> dict[str, Any]:
        repeated = {kind: self.duplicates[kind] for kind in (EXACT, NORMALIZED, NEAR)}
        return {
            "rows": {
                "in": self.rows,
                "out": sum(entry.out for entry in self.inputs),
                "rejected": self.rejected,
                "duplicates": sum(repeated.values()),
            },
            "duplicates": repeated,
            "formats": _by_frequency(self.formats),
            "reasons": _by_frequency(Counter({self._whole[kind]: count for kind, count in self.reasons.items()})),
            "edited": _by_frequency(self.edited),
            "dropped_columns": _by_frequency(self.dropped_columns),
            "inputs": [vars(entry) for entry in self.inputs],
            "duplicates_shown": self.listed_duplicates,
        }


def _by_frequency(counter: Counter[str]) -> dict[str, int]:
    """The most common first; ties by name."""
    return dict(sorted(counter.items(), key=lambda item: (-item[1], item[0])))
