"""The files of a teacher cache: cache.json, the table of its rows, and shards of consecutive rows."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load

from wgpu_lora.data import Row, TokenizedData, Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import file_digest, write_bytes_atomic
from wgpu_lora.files.json_files import read_json, to_json
from wgpu_lora.files.typed_json import typed
from wgpu_lora.names.spelling import setting
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.distill.teacher_logits import TeacherRows, TopKLogits, tail_correction, target_ids, teacher_rows

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
    def finished_rows(self) -> int:
        """Rows in finished shards."""
        return sum(shard.rows for shard in self.shards)

    def write(self, directory: Path) -> None:
        fields = asdict(self)
        write_bytes_atomic(
            directory / CACHE, (to_json({**fields, "sha256": _digest(fields)}, indent=1) + "\n").encode()
        )


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(to_json(values, sort_keys=True).encode()).hexdigest()


def position_bytes(tokens: int, vocab_size: int, logits: str) -> int:
    """Bytes of a position on disk: ids, logits and the log-sum-exp."""
    return packed_bytes(tokens, id_bits(vocab_size)) + tokens * np.dtype(LOGITS[logits]).itemsize + 4


def read_header(directory: Path) -> Header:
    """The header of a cache. Raises UserError if the directory has none, or it is damaged or of another version."""
    path = directory / CACHE
    if not path.is_file():
        raise UserError(f"{directory} is not a teacher cache, since it has no {CACHE}: make one with teacher-cache.")
    result = read_json(path)
    if result.get("schema") != SCHEMA:
        raise UserError(f"{path} has the schema {result.get('schema')!r:.40}, but this version reads {SCHEMA}.")
    try:
        digest = result.pop("sha256", None)  # earlier versions wrote none
        if digest is not None and digest != _digest(result):
            raise ValueError("it is not what was written, by its SHA-256")
        header: Header = typed(Header, result)
        sizes = (header.vocab_size, header.length, header.top_k, header.rows, header.positions)
        sound = min(sizes) > 0 and header.random >= 0 and header.tokens <= header.vocab_size <= 1 << 25
        sound = sound and type(header.options.get("seed")) is int
        if not sound or header.logits not in LOGITS or header.finished_rows > header.rows:
            raise ValueError("its sizes contradict each other")
        if any(Path(shard.file).name != shard.file or shard.rows < 1 for shard in header.shards):
            raise ValueError("it names files outside of it, or empty ones")
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): make the cache again.") from None
    return header


@dataclass(frozen=True, eq=False)
class RowTable:
    """The rows of a cache, ascending by index, which is that of `Row`.

    index: i64 [rows]. positions: i64 [rows], trained tokens. digests: u64 [rows], of ids and labels.
    """

    index: np.ndarray
    positions: np.ndarray
    digests: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Row]) -> RowTable:
        index = np.array([row.index for row in rows], np.int64)
        positions = np.array([row.trained_tokens for row in rows], np.int64)
        return cls(index, positions, np.array([row_digest(row) for row in rows], np.uint64))

    @classmethod
    def read(cls, directory: Path, header: Header) -> RowTable:
        """Raises UserError if the file is missing or damaged."""
        path = directory / TABLE
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): make the cache again.") from None
        if hashlib.sha256(data).hexdigest() != header.table:
            raise UserError(f"{path} is damaged, since its SHA-256 is not that in {CACHE}: make the cache again.")
        try:
            result = load(data)
            table: RowTable | None = cls(*(result[name] for name in ("index", "positions", "digests")))
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


_OPEN = 64  # shards that stay mapped
AT_ONCE = 1 << 30  # bytes of a cache that is hashed before it is used: a second or two
_LARGEST = 0.01  # of log-probabilities, which rounding may make larger than 0
AGAIN = "make the cache again with teacher-cache"


class TeacherCache:
    """The supports of the rows of some data.

    Opening reads the header and the table of rows. A shard's SHA-256 is compared by `check` or, in a cache of more than
    a gigabyte, when one of its rows is first asked for.
    """

    def __init__(self, path: Path, header: Header, table: RowTable):
        self.path, self.header, self._table = path, header, table
        self._rows = np.cumsum([0, *(shard.rows for shard in header.shards)])
        self._positions = np.cumsum([0, *table.positions])
        self._checked: set[int] = set()
        self._open: OrderedDict[int, Any] = OrderedDict()

    @classmethod
    def open(cls, path: str | Path) -> TeacherCache:
        """Open a finished cache.

        Raises:
            UserError: the directory is not a cache, or one that is not finished, or a file is missing, damaged or has
                another size than it was written with.
        """
        path = Path(path)
        header = read_header(path)
        if header.finished_rows < header.rows:
            raise UserError(
                f"The teacher cache {path} is not finished, since it has {header.finished_rows:,} of "
                f"{count_noun(header.rows, 'row')}: run teacher-cache again with the same options, which continues it."
            )
        table = RowTable.read(path, header)
        for shard in header.shards:
            file = path / shard.file
            size = file.stat().st_size if file.is_file() else None
            if size != shard.bytes:
                state = f"{size:,} bytes long, not {shard.bytes:,}" if size else "missing or empty"
                if size and size < shard.bytes:
                    state = f"truncated to {size:,} of {shard.bytes:,} bytes"
                raise UserError(f"{file} is {state}: restore it, or {AGAIN}.")
        return cls(path, header, table)

    @property
    def length(self) -> int:
        """Tokens that rows were cut to."""
        return self.header.length

    @property
    def top_k(self) -> int:
        """K: tokens with the largest logits."""
        return self.header.top_k

    @property
    def random(self) -> int:
        """R: tokens drawn from the rest."""
        return self.header.random

    @property
    def tokens(self) -> int:
        """S = K + R: tokens per position."""
        return self.header.tokens

    @property
    def vocab_size(self) -> int:
        """Of the teacher: the number of its logits."""
        return self.header.vocab_size

    @property
    def rows(self) -> int:
        return self.header.rows

    def digest(self) -> str:
        """SHA-256 (hex) of cache.json, which has the digests of everything else."""
        return file_digest(self.path / "cache.json")

    def check(
        self, prepared: TokenizedData, tokenizer: Tokenizer | None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Raise UserError unless the cache has all of these rows, made with this tokenizer and chat template.

        Held-out rows of the same data may be checked separately, since each row is compared: by its index, and the
        digest of its ids and labels. Unless the cache is large, all shards are compared with their digests.
        """
        header = self.header
        tokenizer_digest = tokenizer.digest if tokenizer else None
        if tokenizer_digest and header.tokenizer and tokenizer_digest != header.tokenizer:
            raise UserError(
                f"The teacher cache {self.path} was made with another tokenizer (SHA-256 {header.tokenizer[:12]}, not "
                f"{tokenizer_digest[:12]}): use a model with the teacher's tokenizer, or {AGAIN}."
            )
        template = template_digest(tokenizer, template_kwargs)
        if template and header.template and template != header.template:
            raise UserError(
                f"The teacher cache {self.path} was made with another chat template (SHA-256 {header.template[:12]}, "
                f"not {template[:12]}): use the teacher's template and {setting('enable_thinking', '...')}, or {AGAIN}."
            )
        self._check_rows(prepared)
        if sum(shard.bytes for shard in header.shards) <= AT_ONCE:
            for number in range(len(header.shards)):
                self._shard(number)

    def _check_rows(self, prepared: TokenizedData) -> None:
        header, table = self.header, self._table
        index = np.array([row.index for row in prepared.rows], np.int64)
        digests = np.array([row_digest(row) for row in prepared.rows], np.uint64)
        nearest = np.minimum(np.searchsorted(table.index, index), header.rows - 1)
        present = table.index[nearest] == index
        mismatches = int(np.count_nonzero(present & (table.digests[nearest] != digests)))
        if mismatches:
            raise self._differing(prepared, mismatches)
        missing = len(index) - int(np.count_nonzero(present))
        if missing:
            raise UserError(
                f"The teacher cache {self.path} is shorter than the data: it has {count_noun(header.rows, 'row')}, and "
                f"{count_noun(missing, 'row')} of {len(index):,} {'is' if missing == 1 else 'are'} missing; {AGAIN}, "
                "or "
                "train on the rows that it has."
            )

    def _differing(self, prepared: TokenizedData, rows: int) -> UserError:
        """The error for `rows` rows that differ from those in the cache."""
        header, cache = self.header, f"The teacher cache {self.path}"
        digest = str(header.data.get("sha256"))
        if prepared.digest == digest and prepared.max_length != header.length:
            return UserError(
                f"{cache} has rows cut to {header.length:,} tokens, but here they may have "
                f"{prepared.max_length:,}: use {setting('max_length', header.length)}, or {AGAIN}."
            )
        name = f"{header.data.get('path')!s:.200}"
        source = f"other data, {name} (SHA-256 {digest[:12]}, not {prepared.digest[:12]})"
        description = f"other trained tokens of {name}" if prepared.digest == digest else source
        return UserError(
            f"{cache} was made of {description}, so that {count_noun(rows, 'row')} of {len(prepared.rows):,} "
            f"{'differs' if rows == 1 else 'differ'}: use the data and options that it was made with, or {AGAIN}."
        )

    def support(self, index: int) -> TopKLogits:
        """The teacher's logits at the trained tokens of a row.

        Args:
            index: the `index` of a `Row` that was checked.

        Raises:
            UserError: the row's shard is missing or damaged.
        """
        row = int(np.searchsorted(self._table.index, index))
        assert row < self.rows, f"the cache has no row {index}"
        assert self._table.index[row] == index, f"the cache has no row {index}"
        number = int(np.searchsorted(self._rows, row, side="right")) - 1
        file = self._shard(number)
        start, stop = (int(at - self._positions[self._rows[number]]) for at in self._positions[[row, row + 1]])
        try:
            packed, logprobs, lse = (file.get_slice(name)[start:stop] for name in ("ids", "logprobs", "lse"))
        except (SafetensorError, OSError):
            raise _damaged(self.path / self.header.shards[number].file) from None
        ids = unpack_ids(packed, self.tokens, self.header.bits)
        descends = np.all(logprobs[:, 1 : self.top_k] <= logprobs[:, : self.top_k - 1])
        finite = np.isfinite(logprobs).all() and np.isfinite(lse).all()
        if not (finite and descends and np.all(logprobs <= _LARGEST) and np.all(ids < self.vocab_size)):
            raise _damaged(self.path / self.header.shards[number].file)
        logits = logprobs.astype(np.float32) + lse[:, None]
        correction = tail_correction(self.vocab_size, self.top_k, self.random)
        return TopKLogits(ids, logits, lse, self.top_k, np.full(len(lse), correction, np.float32))

    def _shard(self, number: int) -> Any:
        """The mapped file of a shard, checked when it is first asked for."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self.header.shards[number]
        path = self.path / shard.file
        try:
            if number not in self._checked and file_digest(path) != shard.sha256:
                raise _damaged(path)
            file = safe_open(path, framework="np")
            self._check_shapes(path, file, shard)
        except (SafetensorError, OSError):
            raise _damaged(path) from None
        self._checked.add(number)
        self._open[number] = file
        while len(self._open) > _OPEN:
            self._open.popitem(last=False)
        return file

    def _check_shapes(self, path: Path, file: Any, shard: Shard) -> None:
        header = self.header
        expected = {
            "ids": ((shard.positions, packed_bytes(header.tokens, header.bits)), np.uint8),
            "logprobs": ((shard.positions, header.tokens), LOGITS[header.logits]),
            "lse": ((shard.positions,), np.float32),
        }
        names = {"U8": np.uint8, "F16": np.float16, "F32": np.float32}
        for name, (shape, dtype) in expected.items():
            part = file.get_slice(name) if name in file.keys() else None  # noqa: SIM118 - not a dict
            if part is None or tuple(part.get_shape()) != shape or names.get(part.get_dtype()) is not dtype:
                raise _damaged(path)


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is damaged, since its content is not what was written: restore it, or {AGAIN}.")


def cached_rows(cache: TeacherCache, labels: np.ndarray, index: int, temperature: float) -> TeacherRows:
    """The cached logits of the row with this index (see `TeacherCache.support`)."""
    return teacher_rows(cache.support(index), target_ids(labels), cache.vocab_size, temperature)


MOST_BITS = 25  # an id and the up to 7 bits before it are within 32 bits
_SLACK = 3  # bytes behind a row that a read of 32 bits may touch


def id_bits(vocab_size: int) -> int:
    """Bits of an id of a vocabulary."""
    return max(1, int(vocab_size - 1).bit_length())


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a row of `count` ids."""
    return -(-count * bits // 8)


def pack_ids(ids: np.ndarray, bits: int) -> np.ndarray:
    """Ids u32 [n, S] as u8 [n, ceil(S bits / 8)]: id s begins at bit s * bits, the lowest bit first."""
    rows, count = ids.shape
    single = (ids[:, :, None] >> np.arange(bits, dtype=np.uint32) & 1).astype(np.uint8)
    return np.packbits(single.reshape(rows, count * bits), axis=1, bitorder="little")


def unpack_ids(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    """The ids u32 [n, count] of what `pack_ids` gave."""
    assert bits <= MOST_BITS
    begin = np.arange(count) * bits
    spare = np.pad(packed, ((0, 0), (0, _SLACK))).astype(np.uint32)
    words = np.zeros((len(packed), count), np.uint32)
    for byte in range(4):
        words |= spare[:, begin // 8 + byte] << np.uint32(8 * byte)
    return words >> (begin % 8).astype(np.uint32) & np.uint32((1 << bits) - 1)


def template_digest(tokenizer: Tokenizer | None, variables: Mapping[str, Any] | None = None) -> str | None:
    """SHA-256 (hex) of a tokenizer's chat templates and the variables given to them; None without a template."""
    if tokenizer is None or not tokenizer.has_chat_template:
        return None
    text = json.dumps([tokenizer.chat_templates, dict(variables or {})], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
