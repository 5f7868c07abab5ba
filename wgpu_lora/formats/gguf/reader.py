"""Reads the values of an untrusted GGUF file in order, never past its end. Arrays are skipped."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from wgpu_lora.errors import UserError

# Limits far beyond real models: 25 MB and 700,000 strings make a large header.
MAX_HEADER_BYTES = 256 << 20
MAX_STRINGS = 1 << 20
MAX_TEXT_BYTES = 8 << 20  # total of all keys, names and single strings
STRING = 8
NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8"}
NUMBERS |= {12: "<f8"}
_ARRAY, _BOOL = 9, 7
_WINDOW = 1 << 18  # bytes of the file in memory at a time


@dataclass(frozen=True)
class Array:
    """An array of the metadata that has been skipped: the type of its items, their number and their offset."""

    kind: int
    count: int
    offset: int
    nbytes: int


def opened(path: Path) -> BinaryIO:
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file: give the path of a GGUF file.")
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        raise UserError(f"the model file {path} does not exist: check the path.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}): restore the file or its permissions.") from None


class Reader:
    """Reads a file in order, with a window of it in memory."""

    def __init__(self, path: Path, file: BinaryIO, offset: int = 0):
        self.path, self.file = path, file
        self.size = file.seek(0, 2)
        self.limit = min(self.size, MAX_HEADER_BYTES)
        self.window, self.first, self.at = b"", 0, offset  # `at` is absolute
        self.strings_left, self.text_left = MAX_STRINGS, MAX_TEXT_BYTES

    def damaged(self, what: str) -> UserError:
        return UserError(f"{self.path} {what}: download or copy the file again.")

    def need(self, count: int, what: str) -> None:
        """Raises UserError unless `count` bytes are left."""
        if count <= self.limit - self.at:
            return
        if self.limit < self.size:
            raise UserError(f"The header of {self.path} is longer than {MAX_HEADER_BYTES >> 20} MiB: use another file.")
        raise self.damaged(f"is truncated or damaged, {what} of {count:,} bytes does not fit into it")

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        start = self.at - self.first
        if start < 0 or start + count > len(self.window):
            self.file.seek(self.at)
            self.first, start = self.at, 0
            self.window = self._read(max(count, _WINDOW))
            if len(self.window) < count:
                raise self.damaged("ended while it was read")
        self.at += count
        return self.window[start : start + count]

    def _read(self, count: int) -> bytes:
        parts = []
        while count and (part := self.file.read(count)):
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), "a number"))[0]

    def text(self, what: str) -> str:
        length = self.number("<Q")
        self.need(length, what)
        self.text_left -= length
        if self.text_left < 0:
            raise self.damaged(f"has more than {MAX_TEXT_BYTES >> 20} MiB of names and texts")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"holds {what:.100} that is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        """Reads a value of the metadata. An array is skipped."""
        if kind == STRING:
            return self.text(f"the value of {key!r:.100}")
        if kind != _ARRAY:
            return self._scalar(kind, key)
        item, count = self.number("<I"), self.number("<Q")
        if item == _ARRAY:
            raise self.damaged(f"nests arrays in {key!r:.100}, which is not supported")
        offset = self.at
        if item == STRING:
            self.need(8 * count, f"the array {key!r:.100}")
            self.strings_left -= count
            if self.strings_left < 0:
                raise self.damaged(f"has more than {MAX_STRINGS:,} strings")
            for _ in self.strings(count, False):
                pass
        elif item in NUMBERS:
            nbytes = np.dtype(NUMBERS[item]).itemsize * count
            self.need(nbytes, f"the array {key!r:.100}")
            self.at += nbytes
        else:
            raise self.damaged(f"has items of the unknown type {item} in {key!r:.100}")
        return Array(item, count, offset, self.at - offset)

    def _scalar(self, kind: int, key: str) -> bool | int | float:
        if kind not in NUMBERS:
            raise self.damaged(f"gives {key!r:.100} the unknown type {kind}")
        dtype = np.dtype(NUMBERS[kind])
        value = np.frombuffer(self.take(dtype.itemsize, "a value"), dtype)[0].item()
        if kind != _BOOL:
            return value
        if value > 1:
            raise self.damaged(f"gives {key!r:.100} the value {value}, expected true or false")
        return bool(value)

    def strings(self, count: int, keep: bool) -> Iterator[bytes]:
        """Yields the next strings, or empty ones unless `keep`, read a window at a time."""
        length_at = struct.Struct("<Q").unpack_from
        while count:
            start = self.at
            window = self.take(min(_WINDOW, self.limit - start), "an array of strings")
            at, end = 0, len(window)
            while count and at + 8 <= end:
                stop = at + 8 + length_at(window, at)[0]
                if stop > end:
                    break
                yield window[at + 8 : stop] if keep else b""
                at, count = stop, count - 1
            self.at = start + at
            if count and (not at or self.limit - self.at < 8):  # a string longer than the window, or the file's end
                length = self.number("<Q")
                self.need(length, "a string")
                yield self.take(length, "a string") if keep else b""
                self.at += 0 if keep else length
                count -= 1
