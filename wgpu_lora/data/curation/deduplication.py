"""Find duplicates among rows as they come: exact, normalised and near."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np

from wgpu_lora.data.curation.curation_options import Preparation
from wgpu_lora.data.curation.row_edits import Read
from wgpu_lora.errors import UserError
from wgpu_lora.files.installation import pip_line
from wgpu_lora.formats.tokenizer.examples import Alpaca, Completion, Conversation, Example, Prompt, Text
from wgpu_lora.names.spelling import flag


class Duplicate(NamedTuple):
    """A duplicate. source, number: of the first row with that content; alike: similarity of a near duplicate."""

    kind: str
    source: int
    number: int
    alike: float | None = None


class Duplicates:
    """The rows so far; `seen` is None if duplicates are kept."""

    def __init__(self, options: Preparation, contents: SeenContents | None, near: NearDuplicates | None) -> None:
        self._exactly = options.duplicates == "exact"
        self._contents, self._near = contents, near

    def add(self, read: Read, source: int, number: int) -> Duplicate | None:
        """Add a row; None unless it repeats another."""
        if self._contents is None:
            return None
        parts = parts_of(read)
        exact, normal = digest(parts), [normalize_text(part) for part in parts]
        key = exact if self._exactly else digest(normal)
        if result := self._contents.add(key, exact[:8], source, number):
            return Duplicate(EXACT if result[0] else NORMALIZED, *result[1:])
        if self._near and (near := self._near.add(read.kind, shingles(normal), source, number)):
            return Duplicate(NEAR, *near[1:], near[0])
        return None


@contextmanager
def duplicates(path: Path, options: Preparation) -> Iterator[Duplicates]:
    """Finds duplicates, with a temporary file at `path`."""
    if options.duplicates == "keep":
        yield Duplicates(options, None, None)
        return
    try:
        with database(path) as connection:
            near = None if options.near_duplicates is None else NearDuplicates(connection, options.near_duplicates)
            yield Duplicates(options, SeenContents(connection), near)
    finally:
        path.unlink(missing_ok=True)


_WORD = re.compile(r"\w+")
SHINGLE = 3  # words


def parts_of(read: Read) -> list[str]:
    """The texts that a row consists of. Other columns, such as an id, are not part of its content."""
    parts = [read.kind, str(read.sample.value)]
    for example in read.sample.examples:
        parts += example_parts(example)
    return parts


def example_parts(example: Example) -> list[str]:
    """The texts of an example, and what is trained of it."""
    match example:
        case Conversation():
            return _conversation(example)
        case Alpaca():
            messages = [*example.prompt_messages, {"role": "assistant", "content": example.output}]
            return _conversation(Conversation(messages, frozenset({len(messages) - 1})))
        case Completion():
            return ["completion", example.prompt, example.completion]
        case Text():
            return ["text", example.text]
        case Prompt():
            return ["prompt", str(example.prompt)]
        case _:
            return ["tokens", str(example.input_ids), str(example.labels)]


def _conversation(example: Conversation) -> list[str]:
    parts = ["conversation"]
    for i, message in enumerate(example.messages):
        fields = {k: v for k, v in message.items() if k not in ("role", "content", "weight") and v is not None}
        parts += [message["role"], "trained" if i in example.trained else "", message["content"] or ""]
        if fields:
            parts.append(json.dumps(fields, sort_keys=True, default=repr))
    if example.tools or example.template_kwargs:
        parts.append(json.dumps([example.tools, example.template_kwargs], sort_keys=True, default=repr))
    return parts


def normalize_text(text: str) -> str:
    """A text without differences in case, white space and Unicode composition (NFC)."""
    if text.isascii():
        return " ".join(text.lower().split())
    return " ".join(normalize("NFC", normalize("NFD", text).casefold()).split())


def digest(parts: list[str], size: int = 16) -> bytes:
    """A digest of texts, whose lengths tell where each ends."""
    text = "".join([f"{len(part)}:{part}" for part in parts])
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def shingles(parts: list[str]) -> list[str]:
    """The runs of SHINGLE words in normalised texts, which near duplicates share."""
    words = [word for part in parts for word in _WORD.findall(part)]
    if len(words) < SHINGLE:
        return [" ".join(words)]
    return [" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)]


CACHE = 64 << 10  # KiB of pages that SQLite keeps in memory
_NUMBER_BITS = 40  # of a position; the rest is the source


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


class SeenContents:
    """Contents by their digests, with the position of the first row that has each."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._do = connection.execute
        # A digest is random, so the table is ordered by it: WITHOUT ROWID saves an index.
        self._do("CREATE TABLE seen (key BLOB PRIMARY KEY, exact BLOB, place INTEGER) WITHOUT ROWID")

    def add(self, key: bytes, exact: bytes, source: int, number: int) -> tuple[bool, int, int] | None:
        """Add a content, unless it has been seen.

        Returns:
            None if it is new, else (whether the first row with it is exactly equal, that row's source and number).
        """
        position = position_code(source, number)
        if self._do("INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", (key, exact, position)).rowcount:
            return None
        [(first, position)] = self._do("SELECT exact, place FROM seen WHERE key = ?", (key,))
        return first == exact, *position_of(position)


def position_code(source: int, number: int) -> int:
    """A position as one number."""
    return source << _NUMBER_BITS | number


def position_of(position: int) -> tuple[int, int]:
    """(source, number of the row) of a stored position."""
    return position >> _NUMBER_BITS, position & (1 << _NUMBER_BITS) - 1


PERMUTATIONS, BANDS = 128, 32  # 4 values a band: finds 99.8% of pairs with a similarity of 0.65, all above 0.75
EXACT, NORMALIZED, NEAR = "exact", "normalized", "near"
COMPARED = 512  # rows that a row is compared with, at most: texts made from one template share bands with all others
_SEED = 1  # of the permutations


class NearDuplicates:
    """Signatures of rows. threshold: least estimated Jaccard similarity of near duplicates."""

    def __init__(self, connection: sqlite3.Connection, threshold: float) -> None:
        try:
            import rensa
        except ImportError:
            raise UserError(f"{flag('near_duplicates')} needs rensa: {pip_line('dedupe')}.") from None
        self._minhash: Any = rensa.RMinHash
        self._do, self._threshold = connection.execute, threshold
        self._many = connection.executemany
        self._do("CREATE TABLE signatures (row INTEGER PRIMARY KEY, signature BLOB, place INTEGER)")
        self._do("CREATE TABLE bands (band BLOB, row INTEGER, PRIMARY KEY (band, row)) WITHOUT ROWID")

    def add(self, kind: str, shingles: Sequence[str], source: int, number: int) -> tuple[float, int, int] | None:
        """Add a row, unless it is a near duplicate.

        Returns:
            None if it is new, else (similarity, source and number) of the first row that is nearest.
        """
        sketch = self._minhash(num_perm=PERMUTATIONS, seed=_SEED)
        sketch.update(shingles)
        signature = np.array(sketch.digest(), np.uint32)
        bands = [
            hashlib.blake2b(part.tobytes(), digest_size=8, person=f"{kind[:8]}{i}".encode()).digest()
            for i, part in enumerate(signature.reshape(BANDS, -1))
        ]
        marks = ",".join("?" * BANDS)
        result = self._do(
            f"SELECT row, signature, place FROM signatures WHERE row IN "
            f"(SELECT DISTINCT row FROM bands WHERE band IN ({marks}) LIMIT {COMPARED}) ORDER BY row",
            bands,
        )
        best: tuple[float, int] | None = None
        for _, row_signature, where in result:
            alike = float(np.mean(np.frombuffer(row_signature, np.uint32) == signature))
            if alike >= self._threshold and (best is None or alike > best[0]):
                best = alike, where
        if best:
            return best[0], *position_of(best[1])
        row = self._do(
            "INSERT INTO signatures (signature, place) VALUES (?, ?)",
            (signature.tobytes(), position_code(source, number)),
        ).lastrowid
        self._many("INSERT INTO bands VALUES (?, ?)", [(band, row) for band in sorted(set(bands))])
        return None
