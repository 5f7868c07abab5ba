"""A protected run's evidence log, evidence.jsonl: each stage of its life, signed by the key of its session.

A session is a start of the run: a first one, and one for each time that it is resumed. It begins with a line
`attested`, which names the session's key and the evidence that binds this key. That the key is to be believed is said
by the release that the broker signed for that evidence, not by the log; `check` puts the two together.

Facts of the stages that `check` compares with other files:

    attested     key (PEM), evidence (file), evidence_sha256
    released     release (file), release_sha256
    opened       rows, trained_rows; subjects: the sealed data
    started      options of the run; subjects: sealed rows that were skipped
    resumed      step; subjects: the checkpoint
    checkpoint   step, loss, removed if the run went back; subjects: the sealed file, none if it went back to its start
    evaluated    step, loss; subjects: the best adapter so far
    finished     the facts of `run_statement.RunFacts`; subjects: the sealed adapter
    failed       error
    interrupted  signal
    wiped        the cleanup record; subjects: cleanup.json
    leftovers    names of files that a killed session left
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import sha256, write_bytes_atomic
from wgpu_lora.files.json_files import to_json
from wgpu_lora.protect.evidence import anchors, dsse
from wgpu_lora.protect.evidence.signed_log import Entry, SignedLog, read_bytes, read_lines, unwritable
from wgpu_lora.protect.sealed.keys import PublicKey, SessionKeys

NAME = "evidence.jsonl"
CLEANUP = "cleanup.json"
KIND = "https://example.org/wgpu-lora/evidence/v1"
CLEANUP_KIND = "https://example.org/wgpu-lora/cleanup/v1"
ENDS = ("finished", "failed", "interrupted")
STAGES = (
    "attested",
    "released",
    "opened",
    "started",
    "resumed",
    "checkpoint",
    "evaluated",
    *ENDS,
    "wiped",
    "leftovers",
)
ANCHORED = ("attested", "checkpoint", *ENDS, "wiped")  # an anchor costs two flushes to the disk


class EvidenceLog(SignedLog):
    """The log of a run, open for one session. A line is on disk when `append` returns, and anchored if it is about a
    checkpoint, or a session's beginning or end.

    Attributes:
        session: the number of the session, from 1; 0 before the first is attested.
    """

    def __init__(self, directory: Path, keys: SessionKeys, run: str = "") -> None:
        super().__init__(directory / NAME, run, KIND, keys.signing)
        self.directory, self.session, self._public = directory, 0, keys.signing.public

    @classmethod
    def start(cls, directory: Path, keys: SessionKeys, run: str) -> Self:
        """A new log in a run's directory. Raises UserError: there is one already, or it cannot be written."""
        if anchors.find(run) is not None:
            raise UserError(f"A run with the id {run!a:.80} was recorded on this machine before: give it another id.")
        log = cls(directory, keys, run)
        log.create()
        return log

    @classmethod
    def resume(cls, directory: Path, keys: SessionKeys) -> Self:
        """Go on with a run's log, which is verified; an incomplete last line, left by a killed process, is cut off.

        Args:
            keys: of the new session, which begins with `attested`.

        Raises:
            UserError: the log is damaged, or older than the one that this machine wrote.
        """
        log = cls(directory, keys)
        log.load(_key_of)
        log.session = sum(entry.stage == "attested" for entry in log.entries)
        anchors.check(log.name, [entry.digest for entry in log.entries])
        return log

    @property
    def after_a_killed_session(self) -> bool:
        """Whether the session before this one has no cleanup record."""
        first = max((number for number, entry in enumerate(self.entries) if entry.stage == "attested"), default=0)
        return first > 0 and self.entries[first - 1].stage != "wiped"

    def attested(self, evidence: bytes) -> Entry:
        """Begin this session: write its evidence to evidence-N.json, and the line that names it and the session's key.
        Raises UserError: a file cannot be written."""
        name, digest = f"evidence-{self.session + 1}.json", sha256(evidence)
        self.keep(name, evidence)
        facts = {"key": self._public.pem, "evidence": name, "evidence_sha256": digest}
        return self.append("attested", facts, [(name, digest)])

    def released(self, token: str, facts: Mapping[str, Any] | None = None) -> Entry:
        """Record the release that the broker answered with, and keep it in release-N.jwt.

        Raises:
            UserError: a file cannot be written.
        """
        name, digest = f"release-{self.session}.jwt", sha256(token.encode())
        self.keep(name, token.encode())
        return self.append("released", {**(facts or {}), "release": name, "release_sha256": digest}, [(name, digest)])

    def wiped(self, record: Mapping[str, Any]) -> Entry:
        """Record the cleanup at the end of a session, as `Cleanup.run` gives it, and keep it, signed, in cleanup.json.
        Raises UserError: a file cannot be written."""
        link = (f"{NAME}:{self.sequence}", self.head)
        data = self.sign(dsse.statement(CLEANUP_KIND, [link], {"session": self.session, **record}))
        self.keep(CLEANUP, data)
        return self.append("wiped", record, [(CLEANUP, sha256(data))])

    def sign(self, statement: Mapping[str, Any]) -> bytes:
        """A DSSE envelope by the session's key."""
        return dsse.sign(json.loads(to_json(statement)), self._key)

    def append(self, stage: str, facts: Mapping[str, Any], subjects: Iterable[tuple[str, str]] = ()) -> Entry:
        """Append a line.

        Args:
            stage: one of STAGES. facts: JSON values, without anything of the rows' text.
            subjects: (path in the run's directory, SHA-256) of the files that the line is about.

        Raises:
            UserError: it cannot be written.
        """
        if stage not in STAGES or (stage != "attested" and not self.session):
            raise ValueError(f"{stage!r} cannot be the next line of an evidence log")
        entry = super().append(stage, facts, subjects)
        self.session += stage == "attested"  # the line is there, whatever becomes of its anchor
        if stage in ANCHORED:
            anchors.remember(self.name, entry.sequence, entry.digest)
        return entry

    def keep(self, name: str, data: bytes) -> None:
        """Write a file beside the log. Raises UserError if it cannot be written."""
        try:
            write_bytes_atomic(self.directory / name, data)
        except OSError as error:
            raise unwritable(self.directory / name, error) from None


def read_log(path: Path) -> list[Entry]:
    """The lines of a log, verified by the keys that its own `attested` lines name; an incomplete last one is left out.
    Raises UserError: the file cannot be read. DamagedError: it is not what was written."""
    return read_lines(read_bytes(path), str(path), KIND, _key_of)[0]


def _key_of(stage: str, facts: Mapping[str, Any], before: Sequence[Entry]) -> PublicKey:
    if stage not in STAGES:
        raise ValueError(f"{stage!r:.40} is not a stage of a run")
    if stage != "attested":
        latest = next((entry for entry in reversed(before) if entry.stage == "attested"), None)
        if latest is None:
            raise ValueError("it comes before any attestation")
        facts = latest.facts
    return PublicKey.parse(str(facts.get("key")))
