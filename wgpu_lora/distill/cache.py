"""A cache of what a teacher says about data, as `wgpu-lora teacher-cache` writes it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from wgpu_lora.atomic import file_digest
from wgpu_lora.data import Prepared, Tokenizer
from wgpu_lora.distill.digests import template_digest
from wgpu_lora.distill.header import LOGITS, Header, Shard, Table, read_header, row_digest
from wgpu_lora.distill.packing import packed_bytes, unpack_ids
from wgpu_lora.distill.support import Support, correction_of
from wgpu_lora.distill.targets import TeacherRows, targets_of, teacher_rows
from wgpu_lora.errors import UserError
from wgpu_lora.names.naming import setting
from wgpu_lora.words import counted

_OPEN = 64  # shards that stay mapped
AT_ONCE = 1 << 30  # bytes of a cache that is hashed before it is used: a second or two
_LARGEST = 0.01  # of log-probabilities, which rounding may make larger than 0
AGAIN = "make the cache again with teacher-cache"


class TeacherCache:
    """The supports of the rows of some data.

    Opening reads the header and the table of rows. A shard's SHA-256 is compared by `check` or, in a cache of more than
    a gigabyte, when one of its rows is first asked for.
    """

    def __init__(self, path: Path, header: Header, table: Table):
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
        if header.finished < header.rows:
            raise UserError(
                f"The teacher cache {path} is not finished, since it has {header.finished:,} of "
                f"{counted(header.rows, 'row')}: run teacher-cache again with the same options, which continues it."
            )
        table = Table.read(path, header)
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
    def kept(self) -> int:
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
        self, prepared: Prepared, tokenizer: Tokenizer | None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Raise UserError unless the cache has all of these rows, made with this tokenizer and chat template.

        Held-out rows of the same data may be checked apart, since rows are compared one by one: by their index, and the
        digest of their ids and labels. Unless the cache is large, all shards are compared with their digests.
        """
        header = self.header
        ours = tokenizer.digest if tokenizer else None
        if ours and header.tokenizer and ours != header.tokenizer:
            raise UserError(
                f"The teacher cache {self.path} was made with another tokenizer (SHA-256 {header.tokenizer[:12]}, not "
                f"{ours[:12]}): use a model with the teacher's tokenizer, or {AGAIN}."
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

    def _check_rows(self, prepared: Prepared) -> None:
        header, table = self.header, self._table
        index = np.array([row.index for row in prepared.rows], np.int64)
        digests = np.array([row_digest(row) for row in prepared.rows], np.uint64)
        places = np.minimum(np.searchsorted(table.index, index), header.rows - 1)
        known = table.index[places] == index
        other = int(np.count_nonzero(known & (table.digests[places] != digests)))
        if other:
            raise self._differing(prepared, other)
        missing = len(index) - int(np.count_nonzero(known))
        if missing:
            raise UserError(
                f"The teacher cache {self.path} is shorter than the data: it has {counted(header.rows, 'row')}, and "
                f"{counted(missing, 'row')} of {len(index):,} {'is' if missing == 1 else 'are'} missing; {AGAIN}, or "
                "train on the rows that it has."
            )

    def _differing(self, prepared: Prepared, rows: int) -> UserError:
        """The error if so many rows are not those that the cache was made of."""
        header, mine = self.header, f"The teacher cache {self.path}"
        digest = str(header.data.get("sha256"))
        if prepared.digest == digest and prepared.max_length != header.length:
            return UserError(
                f"{mine} has rows cut to {header.length:,} tokens, but here they may have {prepared.max_length:,}: use "
                f"{setting('max_length', header.length)}, or {AGAIN}."
            )
        name = f"{header.data.get('path')!s:.200}"
        other = f"other data, {name} (SHA-256 {digest[:12]}, not {prepared.digest[:12]})"
        what = f"other trained tokens of {name}" if prepared.digest == digest else other
        return UserError(
            f"{mine} was made of {what}, so that {counted(rows, 'row')} of {len(prepared.rows):,} "
            f"{'differs' if rows == 1 else 'differ'}: use the data and options that it was made with, or {AGAIN}."
        )

    def support(self, index: int) -> Support:
        """What the teacher says about the trained tokens of a row.

        Args:
            index: the `index` of a `Row` that `check` has seen.

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
        descends = np.all(logprobs[:, 1 : self.kept] <= logprobs[:, : self.kept - 1])
        finite = np.isfinite(logprobs).all() and np.isfinite(lse).all()
        if not (finite and descends and np.all(logprobs <= _LARGEST) and np.all(ids < self.vocab_size)):
            raise _damaged(self.path / self.header.shards[number].file)
        logits = logprobs.astype(np.float32) + lse[:, None]
        correction = correction_of(self.vocab_size, self.kept, self.random)
        return Support(ids, logits, lse, self.kept, np.full(len(lse), correction, np.float32))

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
    """What a cache says about a row of data with this index (see `TeacherCache.support`)."""
    return teacher_rows(cache.support(index), targets_of(labels), cache.vocab_size, temperature)
