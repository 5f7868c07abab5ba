"""The broker's log: every decision with its reasons, signed, on disk before anybody is answered."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.errors import UserError
from wgpu_lora.protect import envelope
from wgpu_lora.protect.chain import MAX_LOG_BYTES, Chain, DamagedError, Entry, first_link, read_bytes
from wgpu_lora.protect.keys import SigningKey

KIND = "https://example.org/wgpu-lora/broker-decision/v1"
HEAD = "https://example.org/wgpu-lora/broker-head/v1"
LOG_FILE, HEAD_FILE = "decisions.jsonl", "head.json"
FULL = MAX_LOG_BYTES - (4 << 20)  # bytes; what is left is for the broker's end


class DecisionLog:
    """A hash-chained log signed by the broker's key, and a signed head beside it: its number of lines, and the last.

    A line that was changed, removed or moved is found by the chain; lines cut off at the end are found by the head. An
    earlier copy of both files together, put back, is not found here: the broker prints its head when it starts and
    ends, so that its owner can compare.

    Attributes:
        entries: the lines that were there when it was opened; they may be cleared once they have been read.
    """

    def __init__(self, directory: Path, key: SigningKey) -> None:
        """Open the log of a directory, verified; an empty directory gets a new one.

        Raises:
            UserError: a file cannot be read or written, or is not what this key's broker wrote.
        """
        self._path, self._head, self._key = directory / LOG_FILE, directory / HEAD_FILE, key
        self._broken = False
        name = f"broker {key.public.keyid}"
        if not self._path.exists():
            if self._head.exists():
                raise DamagedError(f"{self._path} is missing, but {self._head} counts its lines: restore the log.")
            self._chain = Chain.create(self._path, name, KIND)
            os.chmod(self._path, 0o600)
        else:
            self._chain = Chain.open(self._path, KIND, lambda *_: key.public, name)
        self._check_head()
        self.cut = self._chain.cut  # bytes of a line that a crash had left incomplete; nobody was answered about it

    @property
    def entries(self) -> list[Entry]:
        return self._chain.entries

    @property
    def head(self) -> str:
        """The number of lines and the SHA-256 of the last one, to be compared."""
        return f"{self._chain.sequence + 1}:{self._chain.head}"

    def append(self, stage: str, facts: Mapping[str, Any], subjects: Iterable[tuple[str, str]]) -> Entry:
        """Append a line, which is on disk when this returns.

        Raises:
            UserError: it is not; what it records must not happen.
        """
        if self._broken:
            raise UserError(f"{self._head} could not be written and is behind the log: start the broker again.")
        if self._chain.size > FULL and stage != "stopped":
            raise UserError(f"{self._path} is full: start the broker with a new --state directory, and keep this one.")
        entry = self._chain.append(stage, facts, subjects, self._key)
        self._write_head()
        return entry

    def _write_head(self) -> None:
        head = {"lines": self._chain.sequence + 1, "last": self._chain.head}
        signed = envelope.sign(envelope.statement(HEAD, [(LOG_FILE, self._chain.head)], head), self._key)
        try:
            write_bytes_atomic(self._head, signed)
        except OSError as error:
            self._broken = True
            said = f"{self._head} cannot be written ({error.strerror}): make room, then start the broker again."
            raise UserError(said) from None

    def _check_head(self) -> None:
        """The head must be that of the last line, or of the one before: a crash may come between the two writes."""
        digests = [first_link(self._chain.name), *(entry.digest for entry in self.entries)]
        if self._head.exists():
            statement = envelope.verify(read_bytes(self._head, 1 << 16), self._key.public)
            count, last = statement["predicate"].get("lines"), statement["predicate"].get("last")
            if statement["predicateType"] != HEAD or type(count) is not int or count < 1:
                raise DamagedError(f"{self._head} is not the head of a log: restore it.")
        else:
            count, last = 0, digests[0]
        if count >= len(digests):
            raise DamagedError(
                f"{self._path} has {len(digests) - 1:,} lines, but {self._head} counts {count:,}: restore the log."
            )
        if count < len(digests) - 2 or digests[count] != last:
            raise DamagedError(f"{self._head} is not the head of {self._path}: restore both from one copy.")
        if count < len(digests) - 1:
            self._write_head()
