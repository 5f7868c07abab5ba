"""Hash-chained logs: lines that each are a DSSE envelope over an in-toto Statement v1 and name the line before them.

A line can be removed, changed, repeated or moved only by whoever can sign all lines after it. Lines cut off at the end
are not missed here: anchors, the statement and the broker know how far a log had come.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import sync_directory
from wgpu_lora.errors import UserError
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.sealed.keys import PublicKey, SigningKey
from wgpu_lora.strict_json import to_json

MAX_LINE_BYTES = 1 << 20
MAX_LOG_BYTES = 64 << 20
_DIGEST = re.compile("[0-9a-f]{64}")
_FIELDS = {"chain": str, "sequence": int, "previous": str, "stage": str, "time": str, "facts": dict}


class DamagedError(UserError):
    """A log that is not what was written: a line is missing, changed, moved, or signed by another key."""


@dataclass(frozen=True)
class Entry:
    """A line of a log, verified.

    Attributes:
        chain: the log's name. sequence: from 0. previous: SHA-256 of the line before; of the name in the first line.
        time: by the clock of the machine that wrote it, UTC, ISO 8601.
        subjects: names and SHA-256 of the files that the line is about.
        digest: SHA-256 of the line without its newline. keyid: of the key that signed it.
    """

    chain: str
    sequence: int
    previous: str
    stage: str
    time: str
    facts: dict[str, Any]
    subjects: tuple[tuple[str, str], ...]
    digest: str
    keyid: str

    @property
    def seconds(self) -> float:
        """The time, in seconds since 1970."""
        return datetime.fromisoformat(self.time).timestamp()


# The key that must have signed a line, from its stage and facts, not verified yet, and the lines before it.
KeyOf = Callable[[str, Mapping[str, Any], Sequence[Entry]], PublicKey]


@dataclass
class SignedLog:
    """A log that is being written.

    Attributes:
        kind: the statements' predicate type.
        cut: bytes of an incomplete last line that a killed process had left and `open` cut off.
    """

    path: Path
    name: str
    kind: str
    entries: list[Entry] = field(default_factory=list)
    size: int = 0
    cut: int = 0

    @property
    def crowded(self) -> bool:
        """Whether the rest of the log is to be kept for lines that a run needs."""
        return self.size > MAX_LOG_BYTES // 2

    @classmethod
    def create(cls, path: Path, name: str, kind: str) -> SignedLog:
        """A new, empty log; an existing file may have no complete line, as a process killed at once leaves it.

        Raises:
            UserError: there is a log already, or the file cannot be written.
        """
        try:
            if path.exists() and b"\n" in read_bytes(path):
                raise UserError(f"{path} exists already: resume that run, or choose another directory.")
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
            sync_directory(path.parent)
        except OSError as error:
            raise _unwritable(path, error) from None
        return cls(path, name, kind)

    @classmethod
    def open(cls, path: Path, kind: str, key_of: KeyOf, name: str | None = None) -> SignedLog:
        """A log to go on with, verified; an incomplete last line is cut off. `name`: None takes the log's own.

        Raises:
            UserError: it cannot be read or written. DamagedError: it is not what was written.
        """
        data = read_bytes(path)
        entries, whole = read_lines(data, str(path), kind, key_of, name)
        if not entries and name is None:
            raise DamagedError(f"{path} has no complete line: start the run anew in another directory.")
        if whole < len(data):
            try:
                with path.open("r+b") as file:
                    file.truncate(whole)
                    os.fsync(file.fileno())
            except OSError as error:
                raise _unwritable(path, error) from None
        return cls(path, name or entries[0].chain, kind, entries, whole, len(data) - whole)

    @property
    def sequence(self) -> int:
        """The number of the last line, -1 if there is none."""
        return len(self.entries) - 1

    @property
    def head(self) -> str:
        """SHA-256 of the last line, of the name if there is none."""
        return self.entries[-1].digest if self.entries else first_link(self.name)

    def append(
        self, stage: str, facts: Mapping[str, Any], subjects: Iterable[tuple[str, str]], key: SigningKey
    ) -> Entry:
        """Append a line, on disk when this returns.

        Args:
            facts: JSON values; numbers that are not finite become null.
            subjects: names and SHA-256 of files.

        Raises:
            UserError: the file cannot be written, or another process wrote to it; it is then as before.
        """
        subjects = tuple(subjects)
        made: dict[str, Any] = {
            "chain": self.name,
            "sequence": self.sequence + 1,
            "previous": self.head,
            "stage": stage,
            "time": utc_now(),
            "facts": json.loads(to_json(facts)),
        }
        link = (f"{self.path.name}:{self.sequence}", self.head)
        line = dsse.sign(dsse.statement(self.kind, [link, *subjects], made), key)
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{self.path} would have a line of {len(line):,} bytes: record fewer facts in it.")
        if self.size + len(line) >= MAX_LOG_BYTES:
            raise UserError(f"{self.path} is full, at {MAX_LOG_BYTES:,} bytes: start a new run that evaluates less.")
        self._write(line + b"\n")
        entry = Entry(**made, subjects=subjects, digest=_sha256(line), keyid=key.public.keyid)
        self.entries.append(entry)
        return entry

    def _write(self, line: bytes) -> None:
        try:
            with open(self.path, "r+b", buffering=0) as file:  # it must exist
                if file.seek(0, os.SEEK_END) != self.size:
                    raise DamagedError(f"{self.path} was changed by another process: end that process, then resume.")
                try:
                    rest = memoryview(line)
                    while rest:
                        rest = rest[file.write(rest) :]
                    os.fsync(file.fileno())
                except BaseException:
                    with suppress(OSError):
                        file.truncate(self.size)  # a full disk leaves no half line
                    raise
        except OSError as error:
            raise _unwritable(self.path, error) from None
        self.size += len(line)


def read_bytes(path: Path, limit: int = MAX_LOG_BYTES) -> bytes:
    """A file's content.

    Raises:
        UserError: it is missing, unreadable, not a regular file, or longer than the limit.
    """
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise UserError(f"{path} is not a regular file: restore it.")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: give the directory of a protected run.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore the file.") from None
    if len(data) > limit:
        raise UserError(f"{path} is longer than {limit:,} bytes: restore the file.")
    return data


def read_lines(data: bytes, where: str, kind: str, key_of: KeyOf, name: str | None = None) -> tuple[list[Entry], int]:
    """Verify a log: every signature, every link, the numbers, and that all lines belong to one log.

    Args:
        where: start of the error messages, such as a path. name: of the log; None takes that of the first line.

    Returns:
        its lines, and the bytes that they take: what follows them is an incomplete line without a newline.

    Raises:
        DamagedError: it names the line.
    """
    entries: list[Entry] = []
    whole = data.rfind(b"\n") + 1
    for number, line in enumerate(data[:whole].split(b"\n")[:-1]):
        try:
            entry = _verified(line, kind, key_of, entries)
            name = entry.chain if name is None else name
            _check_link(entry, entries, name)
        except (ValueError, UserError) as error:
            said = error.problem if isinstance(error, UserError) else str(error)
            raise DamagedError(f"{where}, line {number + 1}: {said}: the log is not what was written.") from None
        entries.append(entry)
    return entries, whole


def _verified(line: bytes, kind: str, key_of: KeyOf, before: Sequence[Entry]) -> Entry:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {MAX_LINE_BYTES:,} bytes")
    claimed = _predicate(dsse.peek(line), kind)
    key = key_of(claimed["stage"], claimed["facts"], before)
    statement = dsse.verify(line, key)
    made = _predicate(statement, kind)
    pairs = [(item["name"], item["digest"]["sha256"]) for item in statement["subject"]]
    if not pairs or pairs[0][1] != made["previous"]:
        raise ValueError("its first subject is not the line before it")
    return Entry(**made, subjects=tuple(pairs[1:]), digest=_sha256(line), keyid=key.keyid)


def _predicate(statement: Mapping[str, Any], kind: str) -> dict[str, Any]:
    if statement.get("predicateType") != kind:
        raise ValueError(f"its predicate type is {statement.get('predicateType')!r:.80}, not {kind!r}")
    found = statement.get("predicate")
    if not isinstance(found, dict) or set(found) != set(_FIELDS):
        raise ValueError("its predicate has not the fields of a line")
    for name, of in _FIELDS.items():
        if type(found[name]) is not of:
            raise ValueError(f"{name!r} is {found[name]!r:.40}")
    if not _DIGEST.fullmatch(found["previous"]):
        raise ValueError("'previous' is not a SHA-256")
    if datetime.fromisoformat(found["time"]).tzinfo is None:
        raise ValueError("'time' has no time zone")
    return dict(found)


def _check_link(entry: Entry, before: Sequence[Entry], name: str) -> None:
    if entry.chain != name:
        raise ValueError(f"it belongs to the log {entry.chain!r:.80}, not to {name!r:.80}")
    if entry.sequence != len(before):
        raise ValueError(f"it has the number {entry.sequence}, expected {len(before)}")
    if entry.previous != (before[-1].digest if before else first_link(name)):
        raise ValueError("it does not follow the line before it")


def first_link(name: str) -> str:
    """What the first line of a log has in place of the line before it: SHA-256 of the log's name."""
    return _sha256(name.encode())


def utc_now() -> str:
    """The time in UTC with microseconds, as ISO 8601 has it."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written ({error.strerror}): make room or give write permission, then resume.")
