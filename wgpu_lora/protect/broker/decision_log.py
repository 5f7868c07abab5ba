"""The broker's log: every decision with its reasons, signed, on disk before anybody is answered; and its memory.

What a broker remembers is read from its log alone: open nonces, sessions, and how far each job has come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import file_digest, write_bytes_atomic
from wgpu_lora.files.json_files import to_json
from wgpu_lora.files.typed_json import read_as, typed
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.evidence.signed_log import (
    MAX_LINE_BYTES,
    DamagedError,
    Entry,
    SignedLog,
    first_link,
    read_bytes,
)  # fmt: skip
from wgpu_lora.protect.sealed.keys import SigningKey

KIND = "https://example.org/wgpu-lora/broker-decision/v1"
HEAD = "https://example.org/wgpu-lora/broker-head/v1"
HEAD_FILE = "head.json"
PART_BYTES = 8 << 20  # after which a new part begins, so that start and memory do not grow with the log
MAX_STATE_BYTES = MAX_LINE_BYTES * 2 // 3  # in a line, in base64: 2,000 jobs
MOST_LINES = 64  # of a job; the one that was reported stays
_PART = re.compile(r"decisions-(\d+)\.jsonl")


@dataclass
class JobState:
    """A job.

    Attributes:
        session, key: keyid and public key (PEM) of its newest session.
        lines: of its evidence log that are known, number and SHA-256: the newest that was reported, and those that
            sessions stated since then when they resumed. A log that has all of them is not an older one, made longer.
    """

    session: str
    key: str
    lines: list[tuple[int, str]] = field(default_factory=list)

    @property
    def newest(self) -> tuple[int, str] | None:
        """The line that a session must have reached."""
        return self.lines[-1] if self.lines else None


@dataclass
class State:
    """What a broker remembers.

    Attributes:
        nonces: SHA-256 of each nonce that may still be used -> when it expires, in seconds since 1970.
        jobs: by name. sessions: keyid of each session to which the key was released -> its job.
    """

    nonces: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, JobState] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)

    def apply(self, entry: Entry) -> None:
        """Follow a line of the log, the same way when it is written and when it is read again."""
        facts = entry.facts
        if entry.stage == "nonce":
            self.nonces[facts["nonce_sha256"]] = facts["expires"]
            return
        self.nonces.pop(facts.get("nonce_sha256", ""), None)  # used, whatever came of it
        if entry.stage == "released":
            job = self.jobs.get(facts["job"])
            lines, resume = [*job.lines] if job else [], facts["resume"]
            if resume is not None and (line := (resume["sequence"], resume["head"])) not in lines:
                lines.append(line)
            if len(lines) > MOST_LINES:  # a release names them all
                lines[1 : 1 - MOST_LINES] = []
            self.sessions[facts["session"]] = facts["job"]
            self.jobs[facts["job"]] = JobState(facts["session"], facts["session_key"], lines)
        elif entry.stage == "progress":
            self.jobs[facts["job"]].lines = [(facts["sequence"], facts["head"])]
        elif entry.stage == "continued":
            vars(self).update(vars(typed(State, facts["state"])))

    def forget(self, now: float) -> None:
        """Drop the nonces that have expired."""
        self.nonces = {name: expires for name, expires in self.nonces.items() if expires > now}


@dataclass(frozen=True)
class Head:
    """Where the log ends: its last part, the number of lines in it, and the SHA-256 of the last one."""

    part: Annotated[int, Ge(1)]
    lines: Annotated[int, Ge(1)]
    last: str

    def __str__(self) -> str:
        return f"{self.part}:{self.lines}:{self.last}"


class DecisionLog:
    """Signed logs, decisions-N.jsonl, one after the other, and beside them a signed head.

    The first line of a part has the SHA-256 of the part before it, and what a broker must remember of it. So all parts
    are verified at the start, although only the last is read line by line.

    A line that was changed, removed or moved is found by the log's digests; lines cut off at the end are found by the
    head. An earlier copy of the whole directory, put back, is not found here: the broker prints its head when it starts
    and ends, so that its owner can compare.

    Attributes:
        state: what the log says that is to be remembered.
        cut: bytes of a line that a crash had left incomplete; nobody was answered about it.

    Raises:
        UserError: a file cannot be read or written, or is not what this key's broker wrote.
    """

    def __init__(self, directory: Path, key: SigningKey) -> None:
        self._directory, self._key, self._behind = directory, key, False
        self.state, self.cut, self._part = State(), 0, 1
        head = self._read_head()
        parts = sorted(int(match[1]) for path in directory.iterdir() if (match := _PART.fullmatch(path.name)))
        self._log = self._part_log(1)
        if head is None and not parts:
            self._log.create()
            return
        file_head = head or Head(1, 0, self._log.head)
        if parts not in (expected := [*range(1, file_head.part + 1)], [*expected, file_head.part + 1]):
            raise DamagedError(
                f"{directory} has other files than {HEAD_FILE} says, decisions-N.jsonl: restore the log."
            )
        for part in parts:
            self._load(part, file_head)
        if self.head != head:
            self._write_head()

    def _load(self, part: int, file_head: Head) -> None:
        """Verify a part and follow it: one before the head by its first line, one after it if a crash left it."""
        log = self._part_log(part)
        log.load(lambda *_: self._key.public, first_line=part < file_head.part)
        if part > file_head.part and not log.entries:
            log.path.unlink()
            return
        if part > 1:
            before = self._path(part - 1)
            first = log.entries[0] if log.entries else None
            if not first or first.stage != "continued" or first.facts.get("sha256") != file_digest(before):
                raise DamagedError(f"{before} is not what was written before {log.path}: restore the log.")
        if part == file_head.part:
            digests = [first_link(log.name), *(entry.digest for entry in log.entries)]
            count = len(digests) - 1
            if count < file_head.lines:
                raise DamagedError(f"{log.path} has {count:,} lines, but had {file_head.lines:,}: restore the log.")
            # A crash may come between a line and the head.
            if count > file_head.lines + 1 or digests[file_head.lines] != file_head.last:
                raise DamagedError(
                    f"{self._directory / HEAD_FILE} is not the head of the log: restore both from one copy."
                )
        if part > file_head.part and len(log.entries) > 1:
            raise DamagedError(f"{log.path} is not known to {HEAD_FILE}: restore both from one copy.")
        for entry in log.entries if part >= file_head.part else ():
            self.state.apply(entry)
        self._log, self._part, self.cut = log, part, log.cut

    @property
    def head(self) -> Head:
        """Where the log ends."""
        return Head(self._part, len(self._log.entries), self._log.head)

    @property
    def latest(self) -> float:
        """The time of the last line, in seconds since 1970; 0 if there is none."""
        return self._log.entries[-1].seconds if self._log.entries else 0.0

    def check(self) -> None:
        """Raise UserError if nothing can be appended before the broker starts again."""
        if self._behind:
            raise UserError(f"{self._directory / HEAD_FILE} is behind the log: start the broker again.")

    def append(self, stage: str, facts: Mapping[str, Any], subjects: Iterable[tuple[str, str]]) -> None:
        """Append a line, which is on disk, and in the state, when this returns. Raises UserError: it is not; what it
        records must not happen."""
        self.check()
        if self._log.size > PART_BYTES:
            self._begin_part(self._part + 1)
        entry = self._log.append(stage, facts, subjects)
        self._write_head()
        self.state.apply(entry)

    def _path(self, part: int) -> Path:
        return self._directory / f"decisions-{part}.jsonl"

    def _part_log(self, part: int) -> SignedLog:
        return SignedLog(self._path(part), f"broker {self._key.public.keyid}, part {part}", KIND, self._key)

    def _begin_part(self, part: int) -> None:
        before, log, state = self._path(part - 1), self._part_log(part), asdict(self.state)
        if len(to_json(state)) > MAX_STATE_BYTES:
            raise UserError(
                f"{self._directory} has too many jobs to remember: begin another data key with a new --state directory."
            )
        log.create()
        digest = file_digest(before)
        log.append("continued", {"sha256": digest, "state": state}, [(before.name, digest)])
        self._log, self._part = log, part
        self._write_head()

    def _read_head(self) -> Head | None:
        path = self._directory / HEAD_FILE
        if not path.exists():
            return None
        data = read_bytes(path, 1 << 16)
        try:
            statement = dsse.verify(data, self._key.public)
        except UserError:
            raise DamagedError(
                f"{path} is not signed by this broker's key: restore it, or give the signing key of its log."
            ) from None
        if statement["predicateType"] != HEAD:
            raise DamagedError(f"{path} is not the head of a log: restore it.")
        return read_as(Head, statement["predicate"], str(path), unknown="ignore")

    def _write_head(self) -> None:
        path, head = self._directory / HEAD_FILE, self.head
        try:
            statement = dsse.statement(HEAD, [(self._log.path.name, head.last)], asdict(head))
            write_bytes_atomic(path, dsse.sign(statement, self._key))
        except OSError as error:
            self._behind = True
            raise UserError(
                f"{path} cannot be written ({error.strerror}): make room, then start the broker again."
            ) from None
