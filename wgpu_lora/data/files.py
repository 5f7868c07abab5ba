"""A file of rows: which format it has, and its bytes, decompressed where they are gzipped."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, cast

from wgpu_lora.data.source import Place, Rows
from wgpu_lora.errors import UserError
from wgpu_lora.atomic import file_digest

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
FORMATS = "JSONL, a JSON array, CSV or Parquet"
MAX_GROWTH, MIN_GROWN = 200, 64 << 20  # a gzipped file may hold this many times its size, and that much at any rate
_HEAD = 1 << 12
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_OTHERS = {
    b"PK\x03\x04": "is a zip archive or an Excel workbook; unpack it, or save the sheet as CSV in UTF-8",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; decompress it, or use gzip",
    b"\xfd7zXZ\x00": "is compressed with xz; decompress it, or use gzip",
    b"BZh": "is compressed with bzip2; decompress it, or use gzip",
    b"ARROW1": "is an Arrow file; save it as Parquet",
    b"\xff\xfe": "is text in UTF-16; save it as UTF-8",
    b"\xfe\xff": "is text in UTF-16; save it as UTF-8",
}


@dataclass(frozen=True)
class FileSource:
    """A file of rows. reader: what makes rows of it, found out by its name and its first bytes if not given."""

    file: Path
    reader: Callable[[Path], Rows] | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def path(self) -> str:
        return str(self.file)

    @property
    def called(self) -> str:
        return self.path

    @cached_property
    def _read(self) -> Callable[[Path], Rows]:
        return self.reader or reader_of(self.file)

    def rows(self) -> Rows:
        return self._read(self.file)

    def where(self, place: Place) -> str:
        return f"{self.file}, {place}"

    def digest(self) -> str:
        return file_digest(self.file)


def file_source(path: Path) -> FileSource:
    """The rows of a file in any format that is known.

    Raises:
        UserError: it is no regular file, cannot be read, or has no format that is known.
    """
    if not path.is_file():
        wrong = "is not a regular file" if path.exists() else "does not exist"
        raise UserError(f"{path} {wrong}; give a file of rows ({FORMATS}).")
    from wgpu_lora.data.json_array import read_array

    source = FileSource(path, reader_of(path))
    if source.reader is read_array and bare_name(path).suffix != ".json":
        return replace(source, notes=(f"{path.name} is a JSON array: it is read as rows",))
    return source


def bare_name(path: Path) -> Path:
    """The path without .gz."""
    return path.with_suffix("") if path.suffix.lower() == ".gz" else path


def reader_of(path: Path) -> Callable[[Path], Rows]:
    """What reads a file, by its first bytes and, where these do not say it, by its name."""
    from wgpu_lora.data.delimited import read_delimited
    from wgpu_lora.data.json_array import read_array
    from wgpu_lora.data.jsonl import read_lines
    from wgpu_lora.data.parquet import read_parquet

    with opened(path) as file:
        head = file.read(_HEAD)
    suffix = bare_name(path).suffix.lower()
    if head.startswith(_PARQUET) or suffix == ".parquet":
        return read_parquet
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            raise UserError(f"{path} {what}.")
    if suffix in (".csv", ".tsv"):
        return read_delimited
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        return read_array
    if text and not text.startswith(b"{") and suffix not in SUFFIXES:
        raise UserError(
            f"{path} is not a file of rows that can be read; give {FORMATS}, named so ({', '.join(SUFFIXES)})."
        )
    return read_lines


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes; what goes wrong in reading them, also later, is a UserError."""
    try:
        with open(path, "rb") as file:
            if file.read(2) != _GZIP:
                file.seek(0)
                yield file
                return
            file.seek(0)
            size = path.stat().st_size
            with gzip.open(file) as inner, io.BufferedReader(_Bounded(inner, size, path)) as bounded:
                yield cast(IO[bytes], bounded)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} cannot be decompressed ({error}); the file is damaged or cut short.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}).") from error


class _Bounded(io.RawIOBase):
    """What a gzipped file holds, as long as it is not out of proportion."""

    def __init__(self, inner: gzip.GzipFile, size: int, path: Path) -> None:
        self._inner, self._path = inner, path
        self._left = max(MIN_GROWN, MAX_GROWTH * size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._inner.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise UserError(
                f"{self._path} holds more than {MAX_GROWTH} times its own size; if that is right, decompress it."
            )
        return count
