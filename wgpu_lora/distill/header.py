"""The files of a teacher cache: cache.json, the table of its rows, and shards of consecutive rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.bounded import read_json
from wgpu_lora.data import Row
from wgpu_lora.distill.packing import id_bits, packed_bytes
from wgpu_lora.errors import UserError
from wgpu_lora.strict_json import to_json
from wgpu_lora.typed_json import typed

CACHE, TABLE = "cache.json", "rows.safetensors"
SCHEMA = 1
LOGITS: dict[str, type[np.floating[Any]]] = {"f16": np.float16, "f32": np.float32}


@dataclass(frozen=True)
class Shard:
    """A file with the supports of `rows` consecutive rows, which have `positions` trained tokens."""

    file: str
    sha256: str
    bytes: int
    rows: int
    positions: int


@dataclass(frozen=True)
class Header:
    """The content of cache.json.

    options: those that decide what is cached; a run that continues must have the same. length: of rows, in tokens.
    top_k, random: tokens per position. rows, positions: of the whole cache. table: SHA-256 of the table of rows.
    teacher, tokenizer, template, data: names and SHA-256 digests; None where there is nothing to digest.
    shards: those that are finished, in order.
    """

    schema: int
    options: dict[str, Any]
    vocab_size: int
    length: int
    top_k: int
    random: int
    rows: int
    positions: int
    table: str
    teacher: dict[str, Any]
    tokenizer: str | None
    template: str | None
    data: dict[str, Any]
    shards: list[Shard] = field(default_factory=list)

    @property
    def template_date(self) -> str | None:
        """The date that the chat template printed in the rows; None if it prints none."""
        date = self.options.get("template_date")
        return date if isinstance(date, str) else None

    @property
    def logits(self) -> str:
        """Storage type of the logits."""
        return str(self.options.get("logits_dtype"))

    @property
    def tokens(self) -> int:
        """S: tokens per position."""
        return self.top_k + self.random

    @property
    def bits(self) -> int:
        return id_bits(self.vocab_size)

    @property
    def finished(self) -> int:
        """Rows in finished shards."""
        return sum(shard.rows for shard in self.shards)

    def write(self, directory: Path) -> None:
        said = asdict(self)
        write_bytes_atomic(directory / CACHE, (to_json({**said, "sha256": _digest(said)}, indent=1) + "\n").encode())


def _digest(said: dict[str, Any]) -> str:
    return hashlib.sha256(to_json(said, sort_keys=True).encode()).hexdigest()


def position_bytes(tokens: int, vocab_size: int, logits: str) -> int:
    """Bytes of a position on disk: ids, logits and the log-sum-exp."""
    return packed_bytes(tokens, id_bits(vocab_size)) + tokens * np.dtype(LOGITS[logits]).itemsize + 4


def read_header(directory: Path) -> Header:
    """The header of a cache. Raises UserError if the directory has none, or it is damaged or of another version."""
    path = directory / CACHE
    if not path.is_file():
        raise UserError(f"{directory} is not a teacher cache, since it has no {CACHE}: make one with teacher-cache.")
    found = read_json(path)
    if found.get("schema") != SCHEMA:
        raise UserError(f"{path} has the schema {found.get('schema')!r:.40}, but this version reads {SCHEMA}.")
    try:
        stated = found.pop("sha256", None)  # earlier versions wrote none
        if stated is not None and stated != _digest(found):
            raise ValueError("it is not what was written, by its SHA-256")
        header: Header = typed(Header, found)
        sizes = (header.vocab_size, header.length, header.top_k, header.rows, header.positions)
        sound = min(sizes) > 0 and header.random >= 0 and header.tokens <= header.vocab_size <= 1 << 25
        sound = sound and type(header.options.get("seed")) is int
        if not sound or header.logits not in LOGITS or header.finished > header.rows:
            raise ValueError("its sizes contradict each other")
        if any(Path(shard.file).name != shard.file or shard.rows < 1 for shard in header.shards):
            raise ValueError("it names files outside of it, or empty ones")
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): make the cache again.") from None
    return header


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a cache, ascending by index, which is that of `Row`.

    index: i64 [rows]. positions: i64 [rows], trained tokens. digests: u64 [rows], of ids and labels.
    """

    index: np.ndarray
    positions: np.ndarray
    digests: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Table:
        index = np.array([row.index for row in rows], np.int64)
        positions = np.array([row.trained_tokens for row in rows], np.int64)
        return cls(index, positions, np.array([row_digest(row) for row in rows], np.uint64))

    @classmethod
    def read(cls, directory: Path, header: Header) -> Table:
        """Raises UserError if the file is missing or damaged."""
        path = directory / TABLE
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): make the cache again.") from None
        if hashlib.sha256(data).hexdigest() != header.table:
            raise UserError(f"{path} is damaged, since its SHA-256 is not that in {CACHE}: make the cache again.")
        try:
            found = load(data)
            table: Table | None = cls(*(found[name] for name in ("index", "positions", "digests")))
        except (SafetensorError, KeyError):
            table = None
        if table is None or not table._fits(header):
            raise UserError(f"{path} is damaged: make the cache again.")
        return table

    def _fits(self, header: Header) -> bool:
        """Whether it has the rows and positions of a header's shards."""
        if any(a.shape != (header.rows,) or a.dtype.kind not in "iu" for a in self.arrays().values()):
            return False
        if np.any(np.diff(self.index) <= 0) or np.any(self.positions <= 0):
            return False
        ends = np.cumsum([0, *(shard.rows for shard in header.shards)])
        sums = np.concatenate([[0], np.cumsum(self.positions)])[ends]
        return bool(np.array_equal(np.diff(sums), [shard.positions for shard in header.shards]))

    def arrays(self) -> dict[str, np.ndarray]:
        return {"index": self.index, "positions": self.positions, "digests": self.digests}


def row_digest(row: Row) -> int:
    """The first 64 bits of the SHA-256 of a row's ids and labels."""
    data = row.input_ids.astype("<i4").tobytes() + row.labels.astype("<i4").tobytes()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
