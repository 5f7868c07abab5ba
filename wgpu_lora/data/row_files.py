"""Files of rows: detection of the file format, and the readers of CSV, TSV, Parquet and Arrow."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from wgpu_lora.data.compressed_files import Growth, bare_name, opened
from wgpu_lora.data.example_formats import EXAMPLES
from wgpu_lora.data.json_rows import (
    MAX_BLANK,
    MAX_LINE,
    MAX_SHOWN,
    read_array,
    read_lines,
    too_long,
    too_many_blank_lines,
)
from wgpu_lora.data.json_values import dense
from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.data.source import BadRow, NoRowsError, RowPosition, Rows, strict_rows
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.files.installation import pip_line
from wgpu_lora.names.text import count_noun

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
FORMATS = "JSONL, a JSON array, CSV or Parquet"
_HEAD = 1 << 12
_PARQUET = b"PAR1"
_UNSUPPORTED = {
    b"PK\x03\x04": "is a zip archive or an Excel workbook; unpack it, or save the sheet as CSV in UTF-8",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; decompress it, or use gzip",
    b"\xfd7zXZ\x00": "is compressed with xz; decompress it, or use gzip",
    b"BZh": "is compressed with bzip2; decompress it, or use gzip",
    b"ARROW1": "is an Arrow file; save it as Parquet",
    b"\xff\xfe": "is text in UTF-16; save it as UTF-8",
    b"\xfe\xff": "is text in UTF-16; save it as UTF-8",
}
Reader = Callable[[Path, RowFormats[Any]], Rows]


@dataclass(frozen=True)
class FileSource:
    """A file of rows. reader: function that reads it; by default detected from its name and first bytes."""

    file: Path
    reader: Reader | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def path(self) -> str:
        return str(self.file)

    @property
    def is_sealed(self) -> bool:
        return False

    @property
    def display_name(self) -> str:
        return self.path

    @cached_property
    def _read(self) -> Reader:
        return self.reader or reader_of(self.file)

    def rows(self, formats: RowFormats[Any]) -> Rows:
        return self._read(self.file, formats)

    def locate(self, position: RowPosition) -> str:
        return f"{self.file}, {position}"

    def digest(self) -> str:
        return file_digest(self.file)


def file_source(path: Path) -> FileSource:
    """The source of a file in any supported format.

    Raises:
        UserError: the path is not a regular file, cannot be read, or has no supported format.
    """
    if not path.is_file():
        wrong = "is not a regular file" if path.exists() else "does not exist"
        raise UserError(f"{path} {wrong}; give a file of rows ({FORMATS}).")
    source = FileSource(path, reader_of(path))
    if source.reader is read_array and bare_name(path).suffix != ".json":
        return replace(source, notes=(f"{path.name} is a JSON array, whose elements are read as rows",))
    return source


def reader_of(path: Path) -> Reader:
    """The reader of a file, by its first bytes, or by its name if these are ambiguous."""
    with opened(path) as file:
        head = file.read(_HEAD)
    suffix = bare_name(path).suffix.lower()
    if head.startswith(_PARQUET) or suffix == ".parquet":
        return read_parquet
    for magic, description in _UNSUPPORTED.items():
        if head.startswith(magic):
            raise UserError(f"{path} {description}.")
    if suffix in (".csv", ".tsv"):
        return read_delimited
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        return read_array
    if text and not text.startswith(b"{") and suffix not in SUFFIXES:
        raise UserError(
            f"{path} is not a supported file of rows; give {FORMATS}, with a suffix of {', '.join(SUFFIXES)}."
        )
    return read_lines


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of every line; UserError if a line is invalid."""
    for position, row in strict_rows(FileSource(path, read_lines), EXAMPLES):
        yield position.number, row


# -- CSV and TSV: a header with column names, then one row of cells per example ----------------------------------------

DELIMITERS = (",", ";", "\t")
MAX_COLUMNS = 4096
_SEPARATOR = re.compile(r"sep=.\s*")  # for Excel, before the header


def read_delimited(path: Path, formats: RowFormats[Any]) -> Rows:
    """Yield the rows of a file whose first line has the column names, separated by commas, semicolons or tabs.

    A row is what `formats` make of its cells. One that has too many or too few cells, is misquoted, or is not UTF-8 is
    a BadRow. The position of a row is its first line.

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


# -- Parquet files and Arrow tables, in batches of rows ----------------------------------------------------------------

BATCH = 64  # rows decoded together
MAX_BATCH = MAX_LINE  # bytes; rows of a larger batch are decoded one by one
ROW_BYTES, VALUE_BYTES = 64, 8  # that a row, and a value, count for at least


def read_parquet(path: Path, formats: RowFormats[Any]) -> Rows:
    """Yield the rows of a file; null fields, which Arrow adds, are left out.

    Raises:
        UserError: pyarrow is not installed, the file is damaged, or its columns fit no format.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow: {pip_line('data')}.") from None
    with opened(path, raw=True) as source:
        try:
            chunks = _checked_chunks(path, parquet.read_metadata(source))
            # Texts stay in their dictionaries until their size is known: a few kilobytes may decode to gigabytes.
            texts = sorted({chunk.path_in_schema for chunk in chunks if chunk.physical_type == "BYTE_ARRAY"})
            file = parquet.ParquetFile(source, read_dictionary=texts)
            check_columns(file.schema_arrow.names, str(path), formats)
            yield from rows_of(file.iter_batches(BATCH), Growth(path))
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
            raise UserError(f"{path} cannot be read as Parquet ({_first_line(error)}): write it again.") from error


def _checked_chunks(path: Path, metadata: Any) -> list[Any]:
    """The column chunks of a file. Raises UserError if it states more than a file of its size can hold."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = [group.column(i) for group in groups for i in range(metadata.num_columns)]
    Growth(path).add(sum(max(chunk.total_uncompressed_size, VALUE_BYTES * chunk.num_values) for chunk in chunks))
    if not metadata.num_rows:
        raise NoRowsError(f"{path} is empty; at least one row is needed.")
    return chunks


def check_columns(names: list[str], where: str, formats: RowFormats[Any]) -> None:
    """Raise UserError if the columns of a table fit no format or are not unique."""
    try:
        formats.check_columns(names)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if len(set(names)) < len(names):
        raise UserError(f"{where}: two columns have the same name; rename one.")


def rows_of(batches: Iterator[Any], growth: Growth | None = None) -> Rows:
    """Yield the rows of Arrow tables or batches, which are validated first, since their bytes are untrusted.

    growth: of the Parquet file that they are of, whose reader checks all but texts; these are checked as they are used.
    """
    number = 0
    for batch in batches:
        batch.validate(full=growth is None)  # in full, a growing dictionary would be read again for every batch
        one_by_one = _decoded_bytes(batch) > MAX_BATCH
        for part in [batch.slice(i, 1) for i in range(batch.num_rows)] if one_by_one else [batch]:
            if _decoded_bytes(part) > MAX_BATCH:
                number += 1
                yield RowPosition("row", number), too_long()
                continue
            if growth:
                growth.add(max(_decoded_bytes(part), ROW_BYTES * part.num_rows))
            for row in part.to_pylist():
                number += 1
                yield RowPosition("row", number), {key: dense(value) for key, value in row.items()}


def _decoded_bytes(part: Any) -> int:
    """Bytes of an Arrow table, batch or array with every text as often as it occurs."""
    from pyarrow import compute, types

    if hasattr(part, "columns"):
        return sum(map(_decoded_bytes, part.columns))
    if hasattr(part, "chunks"):
        return sum(map(_decoded_bytes, part.chunks))
    if types.is_dictionary(part.type) and not types.is_primitive(part.type.value_type):
        value_counts = part.indices.drop_null().value_counts()
        lengths = compute.binary_length(part.dictionary.take(value_counts.field("values")))
        return int(compute.sum(compute.multiply(lengths.cast("int64"), value_counts.field("counts"))).as_py() or 0)
    if types.is_struct(part.type):
        return sum(map(_decoded_bytes, part.flatten()))
    if types.is_list(part.type) or types.is_large_list(part.type) or types.is_fixed_size_list(part.type):
        return _decoded_bytes(part.flatten())
    return int(part.nbytes)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
