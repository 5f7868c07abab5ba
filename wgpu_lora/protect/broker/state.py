"""What a broker remembers, all of it read from its log: open nonces, sessions, and how far each job has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from wgpu_lora.protect.evidence.chain import Entry

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
