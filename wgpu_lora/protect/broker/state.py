"""What a broker remembers, all of it read from its log: open nonces, sessions, and how far each job has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from wgpu_lora.protect.chain import Entry


@dataclass
class JobState:
    """A job.

    Attributes:
        session, key: keyid and public key (PEM) of its newest session.
        sequence, head: the newest line of its evidence log that is known; -1 and None before there is one.
    """

    session: str
    key: str
    sequence: int = -1
    head: str | None = None


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
        at = (before.sequence, before.head) if before else (-1, None)
        if facts["resume"] is not None:
            at = facts["resume"]["sequence"], facts["resume"]["head"]
        self.jobs[name] = JobState(facts["session"], facts["session_key"], *at)

    def _progress(self, facts: Mapping[str, Any]) -> None:
        job = self.jobs[facts["job"]]
        job.sequence, job.head = facts["sequence"], facts["head"]

    def _carried(self, facts: Mapping[str, Any]) -> None:
        state = facts["state"]
        self.nonces, self.sessions = dict(state["nonces"]), dict(state["sessions"])
        self.jobs = {name: JobState(**job) for name, job in state["jobs"].items()}
