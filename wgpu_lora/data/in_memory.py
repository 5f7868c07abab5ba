"""JSONL in memory, of which nothing must reach a disk or a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wgpu_lora.data.columns import RowFormats
from wgpu_lora.data.jsonl import MAX_LINE, parsed
from wgpu_lora.data.source import NoRowsError, Place, Rows
from wgpu_lora.errors import UserError


class MemorySource:
    """The lines of a buffer, which is overwritten by `wipe`.

    Args:
        name: of the data, for messages and records. sha256: what stands for the data in records.
    """

    def __init__(self, content: bytearray, name: str, sha256: str):
        self._content, self._sha256, self.name = content, sha256, name
        self.notes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return self.name

    @property
    def called(self) -> str:
        return self.name

    @property
    def private(self) -> bool:
        return True

    def rows(self, formats: RowFormats[Any]) -> Rows:
        if self._content[:2] == b"\x1f\x8b":
            raise UserError(f"{self.name} holds a gzip file: seal the JSONL file itself.")
        empty = True
        for place, _, row in parsed(self._lines()):
            empty = False
            yield place, row
        if empty:
            raise NoRowsError(f"{self.name} is empty; at least one row is needed.")

    def _lines(self) -> Iterator[bytes]:
        """The lines; those longer than MAX_LINE are truncated to MAX_LINE + 1 bytes."""
        start = 0
        while start < len(self._content):
            end = self._content.find(b"\n", start) + 1 or len(self._content)
            yield bytes(self._content[start : min(end, start + MAX_LINE + 1)])
            start = end

    def where(self, place: Place) -> str:
        return f"{self.name}, {place}"

    def digest(self) -> str:
        return self._sha256

    def wipe(self) -> int:
        """Overwrite the content; returns its bytes."""
        self._content[:] = bytes(len(self._content))
        return len(self._content)
