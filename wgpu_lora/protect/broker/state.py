"""What a broker remembers, all of it read from its log: open nonces, sessions, and how far each job has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wgpu_lora.protect.chain import Entry


@dataclass
class Session:
    """A session to which the key was released. number: of the job's sessions, from 1. key: its public key, in PEM."""

    job: str
    number: int
    key: str


@dataclass
class JobState:
    """A job. session: keyid of its newest session. sequence, head: the newest place in its log that is known."""

    session: str
    sessions: int = 1
    sequence: int = -1
    head: str | None = None


@dataclass
class State:
    """Attributes:
    nonces: SHA-256 of each nonce that may still be used -> when it expires, in seconds since 1970.
    """

    nonces: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, JobState] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)

    def apply(self, entry: Entry) -> None:
        """Follow a line of the log, the same way when it is written and when it is read again."""
        facts = entry.facts
        if "nonce_sha256" in facts and entry.stage != "nonce":
            self.nonces.pop(facts["nonce_sha256"], None)  # used, whatever came of it
        act = {"nonce": self._nonce, "released": self._released, "progress": self._progress}.get(entry.stage)
        if act:
            act(facts)

    def forget(self, now: float) -> None:
        """Drop the nonces that have expired."""
        self.nonces = {name: expires for name, expires in self.nonces.items() if expires > now}

    def _nonce(self, facts: Mapping[str, Any]) -> None:
        self.nonces[facts["nonce_sha256"]] = facts["expires"]

    def _released(self, facts: Mapping[str, Any]) -> None:
        job = self.jobs.setdefault(facts["job"], JobState(facts["session"], 0))
        job.session, job.sessions = facts["session"], job.sessions + 1
        self.sessions[facts["session"]] = Session(facts["job"], job.sessions, facts["session_key"])
        if facts["resume"] is not None:
            job.sequence, job.head = facts["resume"]["sequence"], facts["resume"]["head"]

    def _progress(self, facts: Mapping[str, Any]) -> None:
        job = self.jobs[facts["job"]]
        job.sequence, job.head = facts["sequence"], facts["head"]
