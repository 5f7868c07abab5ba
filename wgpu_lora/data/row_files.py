"""Files of rows: detection of the file format, and its reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from wgpu_lora.data.compressed_files import bare_name, opened
from wgpu_lora.data.csv_rows import read_delimited
from wgpu_lora.data.example_formats import EXAMPLES
from wgpu_lora.data.json_rows import read_array, read_lines
from wgpu_lora.data.parquet import read_parquet
from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.data.source import RowPosition, Rows, strict_rows
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import file_digest

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
