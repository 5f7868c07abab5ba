"""Finds pieces of secrets in files: every 16-byte window of a secret, in every encoding that it may be written in."""

from __future__ import annotations

import base64
import gzip
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

WINDOW = 16  # bytes of a piece
RUN = 4  # token ids of a piece
ARRAYS = ("<H", ">H", "<I", ">I", "<q", ">q", "<f")  # how arrays of ids are held
NAMES = {"<H": "uint16", ">H": "uint16, big endian", "<I": "uint32", ">I": "uint32, big endian"}
NAMES |= {"<q": "int64", ">q": "int64, big endian", "<f": "float32"}


@dataclass(frozen=True)
class Leak:
    """A piece of a secret in a file. what: the secret and its encoding."""

    path: Path
    offset: int
    what: str


@dataclass
class Pieces:
    """The pieces of several secrets, to be found in files."""

    prefixes: dict[bytes, tuple[str, bytes]] = field(default_factory=dict)  # its first bytes -> what it is of, and all
    _first: np.ndarray | None = None

    def text(self, name: str, text: str) -> None:
        """A text: as UTF-8 and UTF-16, escaped as in JSON, and all of these in base64 and hexadecimal."""
        forms = {
            "UTF-8": text.encode(),
            "UTF-16": text.encode("utf-16-le"),
            "UTF-16, big endian": text.encode("utf-16-be"),
            "JSON": json.dumps(text).encode(),
            "JSON without escapes": json.dumps(text, ensure_ascii=False).encode(),
            "JSON twice": json.dumps(json.dumps(text)).encode(),
            "Python's repr": repr(text).encode(),
        }
        for form, data in forms.items():
            self.data(f"{name} as {form}", data)

    def data(self, name: str, data: bytes) -> None:
        """Bytes: as they are, reversed, and in base64 and hexadecimal."""
        self._add(name, data)
        self._add(f"{name}, reversed", data[::-1])
        for skipped in range(3):  # base64 of what begins elsewhere
            part = data[skipped:]
            coded = base64.b64encode(part[: len(part) // 3 * 3])
            self._add(f"{name} in base64", coded)
            self._add(f"{name} in base64url", coded.translate(bytes.maketrans(b"+/", b"-_")))
        self._add(f"{name} in hexadecimal", data.hex().encode())
        self._add(f"{name} in hexadecimal", data.hex().upper().encode())

    def tokens(self, name: str, ids: Sequence[int]) -> None:
        """Token ids: runs of RUN of them, as arrays of all types, and as they stand in JSON and in Python's lists."""
        for form in ARRAYS:
            if form[1] == "H" and max(ids, default=0) >= 1 << 16:
                continue
            count = max(RUN, WINDOW // struct.calcsize(form))
            for start in range(len(ids) - count + 1):
                run = struct.pack(f"{form[0]}{count}{form[1]}", *ids[start : start + count])
                self.prefixes.setdefault(run[:WINDOW], (f"{name} as {NAMES[form]}", run))
        for between in (", ", ",", " ", "\n"):
            self._add(f"{name} as decimals", between.join(map(str, ids)).encode())

    def _add(self, name: str, data: bytes) -> None:
        for start in range(len(data) - WINDOW + 1):
            window = data[start : start + WINDOW]
            if len(set(window)) > 3:  # not of zeros and the like, which stand anywhere
                self.prefixes.setdefault(window, (name, window))
        self._first = None

    def leaks(self, places: Iterable[Path]) -> list[Leak]:
        """All pieces in files, and in files below directories, but only the first of each file and secret; names of
        files are searched, too."""
        leaks = []
        for path in files_below(places):
            kinds = set[str]()
            try:
                data = path.read_bytes()
            except FileNotFoundError:  # a lock or a socket that is gone
                continue
            for content in (str(path).encode(), data, *_inside(data)):
                for offset, what in self.pieces_of(content):
                    if what not in kinds:
                        kinds.add(what)
                        leaks.append(Leak(path, offset, what))
        return leaks

    def pieces_of(self, data: bytes) -> Iterator[tuple[int, str]]:
        """(offset, what) of every piece in some bytes."""
        if self._first is None:
            self._first = np.unique(np.frombuffer(b"".join(window[:8] for window in self.prefixes), "<u8"))
        if not len(self._first):
            return
        for shift in range(min(8, max(0, len(data) - WINDOW + 1))):
            words = np.frombuffer(data, "<u8", (len(data) - shift) // 8, shift)
            at = np.minimum(np.searchsorted(self._first, words), len(self._first) - 1)
            for index in np.flatnonzero(self._first[at] == words):
                offset = shift + 8 * int(index)
                what, piece = self.prefixes.get(data[offset : offset + WINDOW], ("", b""))
                if piece and data.startswith(piece, offset):
                    yield offset, what


def files_below(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file():
                yield path


def _inside(data: bytes) -> Iterator[bytes]:
    """What a compressed file holds."""
    try:
        if data.startswith(b"\x1f\x8b"):
            yield gzip.decompress(data)
        elif data[:1] == b"\x78":
            yield zlib.decompress(data)
    except (OSError, EOFError, zlib.error):
        return


# -- keys --------------------------------------------------------------------------------------------------------------

_BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
IDENTITY = "AGE-SECRET-KEY-1"


def secret_of(identity: str) -> bytes:
    """The 32 bytes of an age identity (bech32, BIP 173)."""
    digits = [_BECH32.index(letter) for letter in identity.removeprefix(IDENTITY).lower()][:-6]
    number = 0
    for digit in digits:
        number = number << 5 | digit
    return (number >> (5 * len(digits) % 8)).to_bytes(5 * len(digits) // 8, "big")


def identity_pieces(pieces: Pieces, name: str, identity: str) -> None:
    """The text of an age identity, and its secret."""
    pieces.text(name, identity.removeprefix(IDENTITY))
    pieces.data(f"{name}'s secret", secret_of(identity))
