"""The broker's log: every decision with its reasons, signed, on disk before anybody is answered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from wgpu_lora.atomic import file_digest, write_bytes_atomic
from wgpu_lora.errors import UserError
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.evidence.signed_log import (
    MAX_LINE_BYTES,
    DamagedError,
    Entry,
    SignedLog,
    first_link,
    read_bytes,
    read_lines,
)
from wgpu_lora.protect.sealed.keys import SigningKey
from wgpu_lora.strict_json import to_json

KIND = "https://example.org/wgpu-lora/broker-decision/v1"
HEAD = "https://example.org/wgpu-lora/broker-head/v1"
HEAD_FILE = "head.json"
PART_BYTES = 8 << 20  # after which a new part begins, so that start and memory do not grow with the log
MAX_STATE_BYTES = MAX_LINE_BYTES * 2 // 3  # in a line, in base64: 2,000 jobs
_PART = re.compile(r"decisions-(\d+)\.jsonl")


class Head(NamedTuple):
    """Where the log ends: its last part, the number of lines in it, and the SHA-256 of the last one."""

    part: int
    lines: int
    last: str

    def __str__(self) -> str:
        return f"{self.part}:{self.lines}:{self.last}"


class DecisionLog:
    """Hash-chained files, decisions-N.jsonl, signed by the broker's key, and beside them a signed head.

    The first line of a part has the SHA-256 of the part before it, and what a broker must remember of it. So all parts
    are verified at the start, although only the last is read line by line.

    A line that was changed, removed or moved is found by the chain; lines cut off at the end are found by the head. An
    earlier copy of the whole directory, put back, is not found here: the broker prints its head when it starts and
    ends, so that its owner can compare.

    Args:
        follow: called with each line that is read, in order. carry: what the first line of a part remembers.

    Attributes:
        head: where the log ends.
        cut: bytes of a line that a crash had left incomplete; nobody was answered about it.

    Raises:
        UserError: a file cannot be read or written, or is not what this key's broker wrote.
    """

    def __init__(
        self, directory: Path, key: SigningKey, follow: Callable[[Entry], None], carry: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._directory, self._key, self._carry = directory, key, carry
        self._broken = False
        known = self._read_head()
        parts = sorted(int(found[1]) for path in directory.iterdir() if (found := _PART.fullmatch(path.name)))
        if known is None and not parts:
            self._chain, self.head, self.cut = SignedLog.create(self._path(1), self._name(1), KIND), self._first(1), 0
            return
        first = known or self._first(1)
        wanted = list(range(1, first.part + 1))
        if parts not in (wanted, [*wanted, first.part + 1]):
            raise DamagedError(
                f"{directory} has other files than {HEAD_FILE} says, decisions-N.jsonl: restore the log."
            )
        for part in wanted[1:]:
            self._check_link(part, self._first_line(part))
        self._chain, self.cut = self._open(first.part)
        self.head = self._checked(first)
        lines = list(self._chain.entries)
        if len(parts) > len(wanted):
            lines += self._begun(first.part + 1)
        for entry in lines:
            follow(entry)
        if self.head != known:
            self._write_head()

    @property
    def latest(self) -> float:
        """The time of the last line, in seconds since 1970; 0 if there is none."""
        return self._chain.entries[-1].seconds if self._chain.entries else 0.0

    def check(self) -> None:
        """Raise UserError if nothing can be appended before the broker starts again."""
        if self._broken:
            raise UserError(f"{self._directory / HEAD_FILE} is behind the log: start the broker again.")

    def append(self, stage: str, facts: Mapping[str, Any], subjects: Iterable[tuple[str, str]]) -> Entry:
        """Append a line, which is on disk when this returns.

        Raises:
            UserError: it is not; what it records must not happen.
        """
        self.check()
        if self._chain.size > PART_BYTES:
            self._begin_part(self.head.part + 1)
        entry = self._chain.append(stage, facts, subjects, self._key)
        self.head = Head(self.head.part, len(self._chain.entries), entry.digest)
        self._write_head()
        return entry

    def _path(self, part: int) -> Path:
        return self._directory / f"decisions-{part}.jsonl"

    def _name(self, part: int) -> str:
        return f"broker {self._key.public.keyid}, part {part}"

    def _first(self, part: int) -> Head:
        return Head(part, 0, first_link(self._name(part)))

    def _open(self, part: int) -> tuple[SignedLog, int]:
        chain = SignedLog.open(self._path(part), KIND, lambda *_: self._key.public, self._name(part))
        return chain, chain.cut

    def _begin_part(self, part: int) -> None:
        before, path, state = self._path(part - 1), self._path(part), self._carry()
        if len(to_json(state)) > MAX_STATE_BYTES:
            raise UserError(
                f"{self._directory} has too many jobs to remember: begin another data key with a new --state directory."
            )
        if path.exists() and not path.stat().st_size:
            path.unlink()  # it could not be written to
        chain = SignedLog.create(path, self._name(part), KIND)
        digest = file_digest(before)
        entry = chain.append("continued", {"sha256": digest, "state": state}, [(before.name, digest)], self._key)
        self._chain, self.head = chain, Head(part, 1, entry.digest)
        self._write_head()

    def _begun(self, part: int) -> list[Entry]:
        """The first line of a part that a crash may have left, after the last one that the head knows."""
        chain, self.cut = self._open(part)
        if not chain.entries:
            self._path(part).unlink()
            return []
        if len(chain.entries) > 1:
            raise DamagedError(f"{chain.path} is not known to {HEAD_FILE}: restore both from one copy.")
        self._check_link(part, chain.entries[0])
        self._chain, self.head = chain, Head(part, 1, chain.head)
        return chain.entries

    def _first_line(self, part: int) -> Entry:
        path = self._path(part)
        with path.open("rb") as file:
            line = file.readline(MAX_LINE_BYTES + 2)
        entries, _ = read_lines(line, str(path), KIND, lambda *_: self._key.public, self._name(part))
        if not entries:
            raise DamagedError(f"{path} has no complete line: restore the log.")
        return entries[0]

    def _check_link(self, part: int, first: Entry) -> None:
        before = self._path(part - 1)
        if first.stage != "continued" or first.facts.get("sha256") != file_digest(before):
            raise DamagedError(f"{before} is not what was written before {self._path(part)}: restore the log.")

    def _checked(self, known: Head) -> Head:
        """Where the last part ends: where the head says, or a line later, since a crash may come between the writes."""
        digests = [self._first(known.part).last, *(entry.digest for entry in self._chain.entries)]
        count = len(digests) - 1
        if count < known.lines:
            raise DamagedError(f"{self._chain.path} has {count:,} lines, but had {known.lines:,}: restore the log.")
        if count > known.lines + 1 or digests[known.lines] != known.last:
            raise DamagedError(f"{self._directory / HEAD_FILE} is not the head of the log: restore both from one copy.")
        return Head(known.part, count, digests[-1])

    def _read_head(self) -> Head | None:
        path = self._directory / HEAD_FILE
        if not path.exists():
            return None
        try:
            statement = dsse.verify(read_bytes(path, 1 << 16), self._key.public)
        except dsse.EnvelopeError:
            raise DamagedError(
                f"{path} is not signed by this broker's key: restore it, or give the signing key of its log."
            ) from None
        found = statement["predicate"]
        head = Head(found.get("part"), found.get("lines"), found.get("last"))
        if (
            statement["predicateType"] != HEAD
            or [type(value) for value in head] != [int, int, str]
            or min(head[:2]) < 1
        ):
            raise DamagedError(f"{path} is not the head of a log: restore it.")
        return head

    def _write_head(self) -> None:
        path = self._directory / HEAD_FILE
        subject = (self._chain.path.name, self.head.last)
        try:
            write_bytes_atomic(path, dsse.sign(dsse.statement(HEAD, [subject], self.head._asdict()), self._key))
        except OSError as error:
            self._broken = True
            said = f"{path} cannot be written ({error.strerror}): make room, then start the broker again."
            raise UserError(said) from None


MOST_LINES = 64  # of a job; the one that was reported stays


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
    """All of it.

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
        if "nonce_sha256" in facts and entry.stage != "nonce":
            self.nonces.pop(facts["nonce_sha256"], None)  # used, whatever came of it
        acts = {
            "nonce": self._nonce,
            "released": self._released,
            "progress": self._progress,
            "continued": self._carried,
        }
        if act := acts.get(entry.stage):
            act(facts)

    def carried(self) -> dict[str, Any]:
        """What the first line of a part of the log remembers."""
        return asdict(self)

    def forget(self, now: float) -> None:
        """Drop the nonces that have expired."""
        self.nonces = {name: expires for name, expires in self.nonces.items() if expires > now}

    def _nonce(self, facts: Mapping[str, Any]) -> None:
        self.nonces[facts["nonce_sha256"]] = facts["expires"]

    def _released(self, facts: Mapping[str, Any]) -> None:
        name = facts["job"]
        self.sessions[facts["session"]] = name
        before = self.jobs.get(name)
        lines = [*before.lines] if before else []
        if (resume := facts["resume"]) is not None and (line := (resume["sequence"], resume["head"])) not in lines:
            lines.append(line)
        kept = lines if len(lines) <= MOST_LINES else [lines[0], *lines[1 - MOST_LINES :]]  # a release names them all
        self.jobs[name] = JobState(facts["session"], facts["session_key"], kept)

    def _progress(self, facts: Mapping[str, Any]) -> None:
        self.jobs[facts["job"]].lines = [(facts["sequence"], facts["head"])]

    def _carried(self, facts: Mapping[str, Any]) -> None:
        state = facts["state"]
        self.nonces, self.sessions = dict(state["nonces"]), dict(state["sessions"])
        self.jobs = {
            name: JobState(job["session"], job["key"], [(number, head) for number, head in job["lines"]])
            for name, job in state["jobs"].items()
        }
