"""Find duplicates among rows as they come: exact, normalised and near."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from wgpu_lora.data.preparing import content
from wgpu_lora.data.preparing.counts import EXACT, NEAR, NORMALIZED
from wgpu_lora.data.preparing.kinds import Read
from wgpu_lora.data.preparing.near import Near
from wgpu_lora.data.preparing.options import Preparation
from wgpu_lora.data.preparing.seen import Seen, database


class Repeated(NamedTuple):
    """A duplicate. source, number: of the first row with that content; alike: similarity of a near duplicate."""

    how: str
    source: int
    number: int
    alike: float | None = None


class Duplicates:
    """The rows so far; `seen` is None if duplicates are kept."""

    def __init__(self, options: Preparation, seen: Seen | None, near: Near | None) -> None:
        self._exactly = options.duplicates == "exact"
        self._seen, self._near = seen, near

    def add(self, read: Read, source: int, number: int) -> Repeated | None:
        """Add a row; None unless it repeats another."""
        if self._seen is None:
            return None
        parts = content.parts_of(read)
        exact, normal = content.digest(parts), [content.normal(part) for part in parts]
        key = exact if self._exactly else content.digest(normal)
        if found := self._seen.add(key, exact[:8], source, number):
            return Repeated(EXACT if found[0] else NORMALIZED, *found[1:])
        if self._near and (near := self._near.add(read.kind, content.shingles(normal), source, number)):
            return Repeated(NEAR, *near[1:], near[0])
        return None


@contextmanager
def duplicates(path: Path, options: Preparation) -> Iterator[Duplicates]:
    """Finds duplicates, with a temporary file at `path`."""
    if options.duplicates == "keep":
        yield Duplicates(options, None, None)
        return
    try:
        with database(path) as connection:
            near = None if options.near_duplicates is None else Near(connection, options.near_duplicates)
            yield Duplicates(options, Seen(connection), near)
    finally:
        path.unlink(missing_ok=True)
