"""Signed logs: lines that each are a DSSE envelope over an in-toto Statement v1 and name the line before by its digest.

A line can be removed, changed, repeated or moved only by whoever can sign all lines after it. Lines cut off at the end
are not missed here: anchors, the statement and the broker know how far a log had come.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import sha256, sync_directory
from wgpu_lora.files.json_files import read_bytes as read_file
from wgpu_lora.files.json_files import to_json
from wgpu_lora.files.typed_json import typed
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.sealed.keys import PublicKey, SigningKey

MAX_LINE_BYTES = 1 << 20
MAX_LOG_BYTES = 64 << 20


class DamagedError(UserError):
    """A log that is not what was written: a line is missing, changed, moved, or signed by another key."""


@dataclass(frozen=True)
class Predicate:
    """What a line states.

    Attributes:
        chain: the log's name. sequence: from 0. previous: SHA-256 of the line before; of the name in the first line.
        time: by the clock of the machine that wrote it, UTC, ISO 8601.
    """

    chain: str
    sequence: int
    previous: str
    stage: str
    time: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class Entry(Predicate):
    """A line of a log, verified.

    Attributes:
        subjects: names and SHA-256 of the files that the line is about.
        digest: SHA-256 of the line without its newline. keyid: of the key that signed it.
    """

    subjects: tuple[tuple[str, str], ...]
    digest: str
    keyid: str

    @property
    def seconds(self) -> float:
        """The time, in seconds since 1970."""
        return datetime.fromisoformat(self.time).timestamp()


# The key that must have signed a line, from its stage and facts, not verified yet, and the lines before it.
KeyOf = Callable[[str, Mapping[str, Any], Sequence[Entry]], PublicKey]


class SignedLog:
    """A log that is being written; `create` or `load` makes it ready.

    Args:
        name: of the log; "" takes the one that `load` finds. kind: the statements' predicate type. key: signs lines.

    Attributes:
        cut: bytes of an incomplete last line that a killed process had left and `load` cut off.
    """

    def __init__(self, path: Path, name: str, kind: str, key: SigningKey) -> None:
        self.path, self.name, self.kind, self._key = path, name, kind, key
        self.entries, self.size, self.cut = list[Entry](), 0, 0

    def create(self) -> None:
        """Make the file; an existing one may have no complete line, as a process killed at once leaves it. Raises
        UserError: there is a log already, or the file cannot be written."""
        try:
            if self.path.exists() and b"\n" in read_bytes(self.path):
                raise UserError(f"{self.path} exists already: resume that run, or choose another directory.")
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
            sync_directory(self.path.parent)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def load(self, key_of: KeyOf, first_line: bool = False) -> None:
        """Read and verify the file, to go on with it; an incomplete last line is cut off.

        Args:
            first_line: reads only that, of a log that others follow.

        Raises:
            UserError: it cannot be read or written. DamagedError: it is not what was written.
        """
        data = read_bytes(self.path)
        if first_line:
            data = data[: data.find(b"\n") + 1]
        self.entries, self.size = read_lines(data, str(self.path), self.kind, key_of, self.name)
        if not self.entries and not self.name:
            raise DamagedError(f"{self.path} has no complete line: start the run anew in another directory.")
        self.name, self.cut = self.name or self.entries[0].chain, len(data) - self.size
        if self.cut:
            try:
                with self.path.open("r+b") as file:
                    file.truncate(self.size)
                    os.fsync(file.fileno())
            except OSError as error:
                raise unwritable(self.path, error) from None

    @property
    def crowded(self) -> bool:
        """Whether the rest of the log is to be kept for checkpoints and the end of a run."""
        return self.size > MAX_LOG_BYTES // 2

    @property
    def sequence(self) -> int:
        """The number of the last line, -1 if there is none."""
        return len(self.entries) - 1

    @property
    def head(self) -> str:
        """SHA-256 of the last line, of the name if there is none."""
        return self.entries[-1].digest if self.entries else first_link(self.name)

    def append(self, stage: str, facts: Mapping[str, Any], subjects: Iterable[tuple[str, str]] = ()) -> Entry:
        """Append a line, on disk when this returns.

        Args:
            facts: JSON values; numbers that are not finite become null. subjects: names and SHA-256 of files.

        Raises:
            UserError: the file cannot be written, or another process wrote to it; it is then as before.
        """
        subjects = tuple(subjects)
        record = Predicate(self.name, self.sequence + 1, self.head, stage, utc_now(), json.loads(to_json(facts)))
        link = (f"{self.path.name}:{self.sequence}", self.head)
        line = dsse.sign(dsse.statement(self.kind, [link, *subjects], asdict(record)), self._key)
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{self.path} would have a line of {len(line):,} bytes: record fewer facts in it.")
        if self.size + len(line) >= MAX_LOG_BYTES:
            raise UserError(f"{self.path} is full, at {MAX_LOG_BYTES:,} bytes: start a new run that evaluates less.")
        self._write(line + b"\n")
        entry = Entry(**vars(record), subjects=subjects, digest=sha256(line), keyid=self._key.public.keyid)
        self.entries.append(entry)
        return entry

    def _write(self, line: bytes) -> None:
        try:
            with open(self.path, "r+b", buffering=0) as file:  # it must exist
                if file.seek(0, os.SEEK_END) != self.size:
                    raise DamagedError(f"{self.path} was changed by another process: end that process, then resume.")
                try:
                    buffer = memoryview(line)
                    while buffer:
                        buffer = buffer[file.write(buffer) :]
                    os.fsync(file.fileno())
                except BaseException:
                    with suppress(OSError):
                        file.truncate(self.size)  # a full disk leaves no half line
                    raise
        except OSError as error:
            raise unwritable(self.path, error) from None
        self.size += len(line)


def read_bytes(path: Path, limit: int = MAX_LOG_BYTES) -> bytes:
    """A file's content. Raises UserError: it is missing, unreadable, not a regular file, or longer than the limit."""
    data = read_file(path, limit)
    if len(data) > limit:
        raise UserError(f"{path} is longer than {limit:,} bytes: restore the file.")
    return data


def read_lines(data: bytes, where: str, kind: str, key_of: KeyOf, name: str = "") -> tuple[list[Entry], int]:
    """Verify a log: every signature, every link, the numbers, and that all lines belong to one log.

    Args:
        where: start of the error messages, such as a path. name: of the log; "" takes that of the first line.

    Returns:
        its lines, and the bytes that they take: what follows them is an incomplete line without a newline.

    Raises:
        DamagedError: it names the line.
    """
    entries: list[Entry] = []
    whole = data.rfind(b"\n") + 1
    for number, line in enumerate(data[:whole].split(b"\n")[:-1]):
        try:
            entry = _verify_line(line, kind, key_of, entries)
            name = name or entry.chain
            if entry.chain != name:
                raise ValueError(f"it belongs to the log {entry.chain!r:.80}, not to {name!r:.80}")
            if entry.sequence != number:
                raise ValueError(f"it has the number {entry.sequence}, expected {number}")
            if entry.previous != (entries[-1].digest if entries else first_link(name)):
                raise ValueError("it does not follow the line before it")
        except (ValueError, UserError) as error:
            problem = error.problem if isinstance(error, UserError) else str(error)
            raise DamagedError(f"{where}, line {number + 1}: {problem}: the log is not what was written.") from None
        entries.append(entry)
    return entries, whole


def _verify_line(line: bytes, kind: str, key_of: KeyOf, before: Sequence[Entry]) -> Entry:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {MAX_LINE_BYTES:,} bytes")
    record = typed(Predicate, dsse.peek(line)["predicate"], "its predicate", unknown="refuse")
    key = key_of(record.stage, record.facts, before)
    statement = dsse.verify(line, key)
    if statement["predicateType"] != kind:
        raise ValueError(f"its predicate type is {statement['predicateType']!r:.80}, not {kind!r}")
    if datetime.fromisoformat(record.time).tzinfo is None:
        raise ValueError("'time' has no time zone")
    link, *subjects = [(item["name"], item["digest"]["sha256"]) for item in statement["subject"]]
    if link[1] != record.previous:
        raise ValueError("its first subject is not the line before it")
    return Entry(**vars(record), subjects=tuple(subjects), digest=sha256(line), keyid=key.keyid)


def first_link(name: str) -> str:
    """What the first line of a log has in place of the line before it: SHA-256 of the log's name."""
    return sha256(name.encode())


def utc_now() -> str:
    """The time in UTC with microseconds, as ISO 8601 has it."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def unwritable(path: Path, error: OSError) -> UserError:
    """The error for a file that the system refuses to write."""
    return UserError(f"{path} cannot be written ({error.strerror}): make room or give write permission, then resume.")
