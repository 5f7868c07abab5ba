"""The contents that were seen, on disk, so that memory does not grow with the number of rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wgpu_lora.errors import UserError

CACHE = 64 << 10  # KiB of pages that SQLite keeps in memory
_NUMBER_BITS = 40  # of a place; the rest is the source


@contextmanager
def database(path: Path) -> Iterator[sqlite3.Connection]:
    """A temporary database: nothing is synchronised, since it is not used again."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for setting in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", f"cache_size=-{CACHE}"):
            connection.execute(f"PRAGMA {setting}")
        connection.execute("BEGIN")
        yield connection
    except sqlite3.Error as error:
        raise UserError(
            f"The temporary file {path} cannot be used ({error}): free space on its disk, or choose another output."
        ) from error
    finally:
        connection.close()


class Seen:
    """Contents by their digests, with the place of the first row that has each."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._do = connection.execute
        # A digest is random, so the table is ordered by it: WITHOUT ROWID saves an index.
        self._do("CREATE TABLE seen (key BLOB PRIMARY KEY, exact BLOB, place INTEGER) WITHOUT ROWID")

    def add(self, key: bytes, exact: bytes, source: int, number: int) -> tuple[bool, int, int] | None:
        """Add a content, unless it has been seen.

        Returns:
            None if it is new, else (whether the first row with it is exactly equal, that row's source and number).
        """
        place = stored(source, number)
        if self._do("INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", (key, exact, place)).rowcount:
            return None
        [(first, place)] = self._do("SELECT exact, place FROM seen WHERE key = ?", (key,))
        return first == exact, *place_of(place)


def stored(source: int, number: int) -> int:
    """A place as one number."""
    return source << _NUMBER_BITS | number


def place_of(place: int) -> tuple[int, int]:
    """(source, number of the row) of a stored place."""
    return place >> _NUMBER_BITS, place & (1 << _NUMBER_BITS) - 1
