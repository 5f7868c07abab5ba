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
    finished     the facts of `statement.RunFacts`; subjects: the sealed adapter
    failed       error
    interrupted  signal
    wiped        the cleanup record; subjects: cleanup.json
    leftovers    names of files that a killed session left
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.errors import UserError
from wgpu_lora.protect.evidence import anchors, dsse
from wgpu_lora.protect.evidence.signed_log import Entry, SignedLog, read_bytes, read_lines
from wgpu_lora.protect.sealed.keys import PublicKey, SessionKeys
from wgpu_lora.strict_json import to_json

NAME = "evidence.jsonl"
CLEANUP = "cleanup.json"
KIND = "https://example.org/wgpu-lora/evidence/v1"
CLEANUP_KIND = "https://example.org/wgpu-lora/cleanup/v1"
STAGES = (
    "attested", "released", "opened", "started", "resumed", "checkpoint", "evaluated", "finished", "failed",
    "interrupted", "wiped", "leftovers",
)  # fmt: skip
ANCHORED = (
    "attested",
    "checkpoint",
    "finished",
    "failed",
    "interrupted",
    "wiped",
)  # an anchor costs two flushes to the disk


class EvidenceLog:
    """The log of a run, open for one session. A line is on disk when `append` returns, and anchored if it is about a
    checkpoint, or a session's beginning or end.

    Attributes:
        run: the run's id. session: the number of the session, from 1; 0 before the first is attested.
    """

    def __init__(self, directory: Path, chain: SignedLog, keys: SessionKeys):
        self.directory = directory
        self._chain, self._keys = chain, keys
        self.run = chain.name
        self.session = sum(entry.stage == "attested" for entry in chain.entries)

    @classmethod
    def create(cls, directory: Path, keys: SessionKeys, run: str) -> EvidenceLog:
        """A new log in a run's directory.

        Raises:
            UserError: there is one already, or it cannot be written.
        """
        if anchors.find(run) is not None:
            raise UserError(f"A run with the id {run!a:.80} was recorded on this machine before: give it another id.")
        return cls(directory, SignedLog.create(directory / NAME, run, KIND), keys)

    @classmethod
    def resume(cls, directory: Path, keys: SessionKeys, run: str | None = None) -> EvidenceLog:
        """Go on with a run's log, which is verified; an incomplete last line, left by a killed process, is cut off.

        Args:
            keys: of the new session, which begins with `attested`.
            run: the run's id; None takes the log's own.

        Raises:
            UserError: the log is damaged, or older than the one that this machine wrote.
        """
        chain = SignedLog.open(directory / NAME, KIND, _key_of, run)
        anchors.check(chain.name, [entry.digest for entry in chain.entries])
        return cls(directory, chain, keys)

    @property
    def entries(self) -> list[Entry]:
        return list(self._chain.entries)

    @property
    def sequence(self) -> int:
        """The number of the last line, from 0; -1 if there is none."""
        return self._chain.sequence

    @property
    def head(self) -> str:
        """SHA-256 of the last line, in hexadecimal."""
        return self._chain.head

    @property
    def crowded(self) -> bool:
        """Whether the rest of the log is to be kept for checkpoints and the end."""
        return self._chain.crowded

    @property
    def cut(self) -> int:
        """Bytes of an incomplete last line that were cut off when the log was opened."""
        return self._chain.cut

    @property
    def after_a_killed_session(self) -> bool:
        """Whether the session before this one has no cleanup record."""
        entries = self._chain.entries
        first = max((number for number, entry in enumerate(entries) if entry.stage == "attested"), default=0)
        return first > 0 and entries[first - 1].stage != "wiped"

    def attested(self, evidence: bytes) -> Entry:
        """Begin this session: write its evidence to evidence-N.json, and the line that names it and the session's key.

        Raises:
            UserError: a file cannot be written.
        """
        name = f"evidence-{self.session + 1}.json"
        self.keep(name, evidence)
        digest = hashlib.sha256(evidence).hexdigest()
        facts = {"key": self._keys.signing.public.pem, "evidence": name, "evidence_sha256": digest}
        return self.append("attested", facts, [(name, digest)])

    def released(self, token: str, facts: Mapping[str, Any] | None = None) -> Entry:
        """Record the release that the broker answered with, and keep it in release-N.jwt.

        Raises:
            UserError: a file cannot be written.
        """
        name, data = f"release-{self.session}.jwt", token.encode()
        self.keep(name, data)
        digest = hashlib.sha256(data).hexdigest()
        return self.append("released", {**(facts or {}), "release": name, "release_sha256": digest}, [(name, digest)])

    def wiped(self, record: Mapping[str, Any]) -> Entry:
        """Record the cleanup at the end of a session, and keep the record, signed, in cleanup.json.

        Args:
            record: as `Cleanup.run` gives it.

        Raises:
            UserError: a file cannot be written.
        """
        link = (f"{NAME}:{self.sequence}", self.head)
        data = self.sign(dsse.statement(CLEANUP_KIND, [link], {"session": self.session, **record}))
        self.keep(CLEANUP, data)
        return self.append("wiped", record, [(CLEANUP, hashlib.sha256(data).hexdigest())])

    def sign(self, statement: Mapping[str, Any]) -> bytes:
        """A DSSE envelope by the session's key."""
        return dsse.sign(json.loads(to_json(statement)), self._keys.signing)

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
        entry = self._chain.append(stage, facts, subjects, self._keys.signing)
        self.session += stage == "attested"  # the line is there, whatever becomes of its anchor
        if stage in ANCHORED:
            anchors.remember(self.run, entry.sequence, entry.digest)
        return entry

    def keep(self, name: str, data: bytes) -> None:
        """Write a file beside the log.

        Raises:
            UserError: it cannot be written.
        """
        try:
            write_bytes_atomic(self.directory / name, data)
        except OSError as error:
            raise UserError(
                f"{self.directory / name} cannot be written ({error.strerror}): make room or give write permission."
            ) from None


def read_log(path: Path) -> list[Entry]:
    """The lines of a log, verified by the keys that its own `attested` lines name.

    An incomplete last line is left out.

    Raises:
        UserError: the file cannot be read. DamagedError: it is not what was written.
    """
    entries, _ = read_lines(read_bytes(path), str(path), KIND, _key_of)
    return entries


def _key_of(stage: str, facts: Mapping[str, Any], before: Sequence[Entry]) -> PublicKey:
    if stage not in STAGES:
        raise ValueError(f"{stage!r:.40} is not a stage of a run")
    if stage == "attested":
        return PublicKey.parse(str(facts.get("key")))
    latest = next((entry for entry in reversed(before) if entry.stage == "attested"), None)
    if latest is None:
        raise ValueError("it comes before any attestation")
    return PublicKey.parse(str(latest.facts.get("key")))
