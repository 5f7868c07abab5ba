"""Open files, decompressing gzip within limits."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from wgpu_lora.errors import UserError

MAX_GROWTH = 200  # largest ratio of decompressed to compressed size
MIN_GROWN = 64 << 20  # decompressed bytes that are accepted at any ratio
_GZIP = b"\x1f\x8b"
_open: dict[Path, IO[bytes]] = {}


def position(path: Path) -> int | None:
    """How many bytes of a file have been read, for progress; None unless it is being read."""
    file = _open.get(path)
    try:
        return None if file is None else file.tell()
    except ValueError:  # it has been closed
        return None


def files_in_use() -> list[Path]:
    """The files that are being read, in the order in which they were opened."""
    return list(_open)


def bare_name(path: Path) -> Path:
    """The path without .gz."""
    return path.with_suffix("") if path.suffix.lower() == ".gz" else path


@contextmanager
def opened(path: Path, raw: bool = False) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes; errors in reading, also later ones, become UserErrors.

    Args:
        raw: whether a gzipped file is read as it is.
    """
    try:
        with open(path, "rb") as file:
            _open[path] = file
            if raw or file.read(2) != _GZIP:
                file.seek(0)
                yield file
                return
            file.seek(0)
            with gzip.open(file) as inner, io.BufferedReader(_Bounded(inner, Growth(path))) as bounded:
                yield cast(IO[bytes], bounded)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} cannot be decompressed ({error}); the file is damaged or truncated.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}).") from error
    finally:
        _open.pop(path, None)


class Growth:
    """Bounds what a file is expanded to, by what has been read of it so far."""

    def __init__(self, path: Path) -> None:
        self._path, self._remaining_bytes = path, max(MIN_GROWN, MAX_GROWTH * path.stat().st_size)

    def add(self, count: int) -> None:
        """Count bytes that were read. Raises UserError if there were too many."""
        self._remaining_bytes -= count
        if self._remaining_bytes < 0:
            raise UserError(
                f"{self._path} expands to more than {MAX_GROWTH} times its size; if that is right, write it without "
                "compression."
            )


class _Bounded(io.RawIOBase):
    """The contents of a gzipped file, with a limit on their size."""

    def __init__(self, inner: gzip.GzipFile, growth: Growth) -> None:
        self._inner, self._growth = inner, growth

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._inner.readinto(buffer)
        self._growth.add(count)
        return count
