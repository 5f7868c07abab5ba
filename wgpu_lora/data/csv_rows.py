"""Read CSV and TSV: a header with column names, then one row of cells per example."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from wgpu_lora.data.compressed_files import opened
from wgpu_lora.data.json_rows import MAX_BLANK, MAX_LINE, MAX_SHOWN, too_many_blank_lines
from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.data.source import BadRow, NoRowsError, RowPosition, Rows
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun

DELIMITERS = (",", ";", "\t")
MAX_COLUMNS = 4096
_SEPARATOR = re.compile(r"sep=.\s*")  # for Excel, before the header


def read_delimited(path: Path, formats: RowFormats[Any]) -> Rows:
    """Yield the rows of a file whose first line has the column names, separated by commas, semicolons or tabs.

    A row is what `formats` make of its cells. One that has too many or too few cells, is misquoted, or is not UTF-8 is
    a Problem. The position of a row is its first line.

    Raises:
        UserError: the file cannot be read or is empty, its header fits no format, or a quotation mark is not closed.
    """
    if csv.field_size_limit() < MAX_LINE:  # a limit of the whole process
        csv.field_size_limit(MAX_LINE)
    names: list[str] | None = None
    empty = True
    with opened(path) as file:
        for line, cells in _records(file, path, formats):
            if names is None:
                names = _columns(cells, f"{path}, line {line}", formats)
                continue
            empty = False
            yield RowPosition("line", line), cells if isinstance(cells, BadRow) else _row(names, cells, formats)
    if empty:
        raise NoRowsError(f"{path} is empty: add a line with the column names, and at least one row.")


def _records(file: IO[bytes], path: Path, formats: RowFormats[Any]) -> Iterator[tuple[int, list[str] | BadRow]]:
    """(first line, cells) of every record that is not blank."""
    lines = _LineReader(file)
    reader = csv.reader(lines, delimiter=_delimiter(lines, formats), strict=True)
    blank = 0
    while True:
        begin, lines.record_length = lines.skipped_lines + reader.line_num + 1, 0
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error) or "larger than" in str(error):
                raise UserError(
                    f"{path}, line {begin}: a quotation mark is not closed, or the row is longer than "
                    f"{MAX_LINE >> 20} MiB: close it, or split the row."
                ) from error
            lone = "new-line" in str(error)
            wrong = "a line ends with a lone carriage return" if lone else f"not CSV: {error}"
            yield begin, BadRow(f"{wrong}; save the file from a spreadsheet.", lines.last[:MAX_SHOWN])
            continue
        if cells:
            yield begin, _decoded(cells)
        elif (blank := blank + 1) > MAX_BLANK:
            raise UserError(too_many_blank_lines(begin))


class _LineReader:
    """The lines of a file as text, for the csv module, limited to MAX_LINE bytes per record.

    first: the header; skipped_lines: lines before it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.first = self._read().removeprefix("\ufeff")
        self.skipped_lines = int(_SEPARATOR.fullmatch(self.first) is not None)
        if self.skipped_lines:
            self.first = self._read()
        self._pending_lines, self.record_length, self.last = [self.first], 0, ""

    def __iter__(self) -> _LineReader:
        return self

    def __next__(self) -> str:
        self.last = self._pending_lines.pop() if self._pending_lines else self._read()
        self.record_length += len(self.last)
        if self.record_length > MAX_LINE:
            raise csv.Error("larger than a row may be")
        if not self.last:
            raise StopIteration
        return self.last

    def _read(self) -> str:
        # Invalid UTF-8 becomes surrogates, so that only its row is refused.
        return self._file.readline(MAX_LINE + 1).decode("utf-8", "surrogateescape")


def _delimiter(lines: _LineReader, formats: RowFormats[Any]) -> str:
    """The delimiter with which the header fits a format, else the one that gives the most columns."""
    try:
        result = {mark: next(csv.reader([lines.first], delimiter=mark), []) for mark in DELIMITERS}
    except csv.Error:  # reading the header reports it with its line
        return DELIMITERS[0]
    fitting = [mark for mark, names in result.items() if formats.matches([*map(str.strip, names)])]
    return fitting[0] if fitting else max(DELIMITERS, key=lambda mark: len(result[mark]))


def _decoded(cells: list[str]) -> list[str] | BadRow:
    try:
        "".join(cells).encode("utf-8")
    except UnicodeEncodeError:
        text = ",".join(cells)[:MAX_SHOWN].encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return BadRow("not valid UTF-8; save the file as UTF-8.", text)
    return cells


def _columns(cells: list[str] | BadRow, where: str, formats: RowFormats[Any]) -> list[str]:
    """The column names. Raises UserError if they fit no format or are not unique."""
    if isinstance(cells, BadRow):
        raise UserError(f"{where}: {cells.reason}")
    names = [name.strip() for name in cells]
    if len(names) > MAX_COLUMNS:
        raise UserError(
            f"{where}: the header has {len(names):,} columns, but the limit is {MAX_COLUMNS:,}: remove some."
        )
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice:
        raise UserError(f"{where}: two columns are named {twice[:80]!r}; rename one.")
    try:
        formats.check_columns(names)
    except UserError as error:
        raise UserError(f"{where}: the first line must have the column names: {error}") from error
    return names


def _row(names: list[str], cells: list[str], formats: RowFormats[Any]) -> dict[str, Any] | BadRow:
    if len(cells) != len(names):
        reason = f"it has {count_noun(len(cells), 'cell')}, but the header names {count_noun(len(names), 'column')}."
        return BadRow(reason, cells)
    return formats.from_csv({name: cell for name, cell in zip(names, cells, strict=True) if name})
