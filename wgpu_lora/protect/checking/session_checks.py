"""What a check found: proven, only claimed, or failed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import file_digest
from wgpu_lora.bounded import escape_unprintable, is_path, links_outside
from wgpu_lora.errors import UserError
from wgpu_lora.protect.attestation.claims import Evidence, read_evidence
from wgpu_lora.protect.broker.release_token import AFFIRMING, SLACK, missing_line, read_release
from wgpu_lora.protect.evidence.signed_log import Entry, read_bytes
from wgpu_lora.protect.policies.appraisal import appraise
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import PublicKey

MAX_SHOWN = 70  # characters of a value in a message


@dataclass
class Findings:
    """Sentences without a full stop. A run is verified if none failed."""

    proven: list[str] = field(default_factory=list)
    claimed: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def fail(self, said: str) -> None:
        self.failures.append(escape_unprintable(said))

    def expect(self, what: str, found: Any, expected: Any) -> bool:
        """Fail unless two values are equal; of mappings and lists, each part that differs is named."""
        differing = list(_differences(what, found, expected))
        for where, one, other in differing:
            self.fail(f"{where} is {_shown(one)}, expected {_shown(other)}")
        return not differing

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """What cannot be read, or has another form, fails here, and the check goes on with the next part."""
        try:
            yield
        except UserError as error:
            self.fail(f"{what}: {error.lines[0]}")
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            self.fail(f"{what} has not the form it must have ({type(error).__name__}: {error!s:.100})")


class Missing:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()


def _differences(where: str, found: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for name in sorted({*found, *expected}, key=str):
            yield from _differences(f"{where}.{name}", found.get(name, MISSING), expected.get(name, MISSING))
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from _differences(f"{where}[{number}]", one, other)
    elif type(found) is not type(expected) or found != expected:
        yield where, found, expected


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def digest_of(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def small_file(directory: Path, name: str, limit: int = 8 << 20) -> bytes:
    """A small file of a run's directory. Raises UserError."""
    return read_bytes(directory / name, limit)


def digest_in(directory: Path, name: str) -> str | None:
    """SHA-256 of a file in a run's directory, whose name is untrusted; None if it is not there.

    Raises:
        UserError: the name leads elsewhere, or the file cannot be read.
    """
    path = directory / name
    if not is_path(name) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"{name!a:.80} is not the name of a file of the run: restore the log.")
    if not path.exists():
        return None
    if not path.is_file() or links_outside(path, directory):
        raise UserError(f"{path} is not a regular file of the run: restore it.")
    try:
        return file_digest(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore it.") from None


BEFORE_RELEASE = ("attested", "released", "leftovers", "failed", "interrupted", "wiped")
ENDS = ("finished", "failed", "interrupted")
STEPS = "checkpoints/"
REMOVED = "removed"  # the fact of a line that names an older checkpoint, since the run went back to it
BACK = 1.0  # seconds by which the clock may go back between two lines


@dataclass
class Session:
    """A session's lines, and what belongs to them. number: from 1."""

    number: int
    entries: list[Entry]
    evidence: Evidence | None = None
    release: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> PublicKey:
        return PublicKey.parse(self.entries[0].facts["key"])

    @property
    def claims(self) -> Mapping[str, Any]:
        return self.evidence.claims if self.evidence else {}

    def steps(self) -> list[Entry]:
        """The lines about checkpoints of steps; after each, its checkpoint is the newest one, or there is none."""
        return [one for one in self.named("checkpoint") if _of_step(one)]

    def named(self, *stages: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.stage in stages]


def _of_step(entry: Entry) -> bool:
    return entry.subjects[0][0].startswith(STEPS) if entry.subjects else REMOVED in entry.facts


def sessions_of(entries: Sequence[Entry]) -> list[Session]:
    """A log's lines by session; the first line of a verified log is `attested`."""
    found: list[Session] = []
    for entry in entries:
        if entry.stage == "attested":
            found.append(Session(len(found) + 1, []))
        found[-1].entries.append(entry)
    return found


def check_sessions(
    run: Path, sessions: Sequence[Session], broker: PublicKey | None, policy: Policy | None, found: Findings
) -> None:
    """Verify evidence, releases, and what the lines of a session say about each other."""
    before: Entry | None = None
    for session in sessions:
        with found.part(f"evidence-{session.number}.json"):
            _check_evidence(run, session, before, found)
        with found.part(f"release-{session.number}.jwt"):
            _check_release(run, session, broker, found)
            _check_known(session, sessions, found)
        with found.part(f"session {session.number}"):
            _check_stages(session, sessions, found)
        if policy is not None and session.evidence is not None and session.release:
            with found.part(f"the policy for session {session.number}"):
                _check_policy(session, before, policy, found)
        before = session.entries[-1]
    _check_unlike(sessions, found)
    lines = [entry for session in sessions for entry in session.entries]
    for one, other in pairwise(lines):
        if other.seconds < one.seconds - BACK:
            found.fail(f"the clock went back by {one.seconds - other.seconds:,.0f} s at line {other.sequence + 1}")
    for session in sessions[1:]:
        found.expect(f"the job of session {session.number}", session.claims.get("job"), sessions[0].claims.get("job"))


def _check_evidence(run: Path, session: Session, before: Entry | None, found: Findings) -> None:
    line, name = session.entries[0], f"evidence-{session.number}.json"
    data = small_file(run, name)
    found.expect(f"the evidence of session {session.number} in the log", line.facts.get("evidence"), name)
    if not found.expect(f"SHA-256 of {name}", digest_of(data), line.facts.get("evidence_sha256")):
        return
    evidence = read_evidence(data)
    session.evidence = evidence
    claims = evidence.claims
    found.expect(f"the key that {name} binds", evidence.signing.keyid, line.keyid)
    expected = {} if before is None else {"sequence": before.sequence, "head": before.digest}
    found.expect(f"the end of the log that {name} states", dict(claims.get("resume") or {}), expected)
    if not -SLACK <= line.seconds - float(claims["iat"]) <= SLACK:
        found.fail(f"{name} was made {line.seconds - float(claims['iat']):,.0f} s before the log's line that names it")


def _check_release(run: Path, session: Session, broker: PublicKey | None, found: Findings) -> None:
    number, name = session.number, f"release-{session.number}.jwt"
    lines = session.named("released")
    if not lines:
        return  # _check_stages: then it may do nothing that needs a release
    data = small_file(run, name)
    found.expect(f"the release of session {number} in the log", lines[0].facts.get("release"), name)
    if len(lines) != 1 or not found.expect(f"SHA-256 of {name}", digest_of(data), lines[0].facts.get("release_sha256")):
        return
    release = read_release(data.decode("ascii"), broker)
    session.release = release
    claims, evidence = session.claims, session.evidence
    expected = {
        "iss": broker.keyid if broker else release["iss"],
        "aud": session.entries[0].keyid,
        "sub": claims.get("job", {}).get("name"),
        "eat_nonce": claims.get("eat_nonce"),
        "ear.status": AFFIRMING,
        "evidence_sha256": evidence.sha256 if evidence else None,
    }
    for key, value in expected.items():
        found.expect(f"{key} of {name}", release[key], value)
    if release["recipient"] not in claims.get("job", {}).get("recipients", []):
        found.fail(f"the key that {name} released is not among the job's recipients")
    asked, used = session.entries[0].seconds, max(line.seconds for line in session.named("released", "opened"))
    if used >= release["exp"]:
        found.fail(f"{name} had expired {used - release['exp']:,.0f} s before it was used")
    if not asked - SLACK <= release["iat"] <= used + SLACK:
        found.fail(f"{name} was not issued between the attestation of session {number} and its use")


def _check_known(session: Session, sessions: Sequence[Session], found: Findings) -> None:
    """The log has the lines that the broker knew at a release; else it was put back, and went on otherwise."""
    if not session.release:
        return
    lines = [entry.digest for one in sessions[: session.number - 1] for entry in one.entries]
    if (missing := missing_line(session.release, lines)) is not None:
        found.fail(f"the broker knew another line {missing + 1} before session {session.number} than the log has")


def _check_stages(session: Session, sessions: Sequence[Session], found: Findings) -> None:
    """The order of a session's lines, its data, its limits, and the checkpoint that it goes on from."""
    what = f"session {session.number}"
    released = False
    for entry in session.entries:
        released = released or entry.stage == "released"
        if not released and entry.stage not in BEFORE_RELEASE:
            found.fail(f"{what} has the line {entry.stage!r} before any release")
    stages = [entry.stage for entry in session.entries]
    for stage in ("released", *ENDS, "wiped"):
        if stages.count(stage) > 1:
            found.fail(f"{what} has {stages.count(stage)} lines {stage!r}")
    ends = [number for number, stage in enumerate(stages) if stage in ENDS]
    if ends and [*stages[ends[0] + 1 :], "wiped"][:1] != ["wiped"]:
        found.fail(f"{what} goes on with {stages[ends[0] + 1]!r} after it {stages[ends[0]]}")
    if "wiped" in stages[:-1]:
        found.fail(f"{what} goes on after its cleanup")
    _check_data(session, found)
    _check_steps(session, sessions, found)


def _check_data(session: Session, found: Findings) -> None:
    what, opened = f"session {session.number}", session.named("opened")
    if not opened:
        if session.named("started", "resumed", "checkpoint", "finished"):
            found.fail(f"{what} trained without opening data")
        return
    data = session.claims.get("job", {}).get("data", [])
    expected = sorted(item["sha256"] for item in data)
    found.expect(f"the data of {what}", sorted(digest for line in opened for _, digest in line.subjects), expected)
    fewest = session.release.get("min_rows")
    rows = max(line.facts.get("trained_rows", 0) for line in opened)
    if fewest is not None and rows < fewest:
        found.fail(f"{what} trained on {rows} rows, fewer than {fewest}")


def _check_steps(session: Session, sessions: Sequence[Session], found: Findings) -> None:
    what, most = f"session {session.number}", session.release.get("max_steps")
    earlier = [entry for one in sessions[: session.number - 1] for entry in one.steps()]
    for entry in session.named("resumed"):
        if not earlier or not earlier[-1].subjects:
            found.fail(f"{what} resumed from a checkpoint that no earlier session made")
        else:
            found.expect(f"the checkpoint that {what} resumed from", entry.subjects, earlier[-1].subjects)
            found.expect(f"the step that {what} resumed from", entry.facts.get("step"), earlier[-1].facts.get("step"))
    if earlier and earlier[-1].subjects and session.named("started"):
        found.fail(f"{what} started anew though there was a checkpoint")
    step = highest = earlier[-1].facts["step"] if earlier else 0
    for entry in [*session.steps(), *session.named("finished")]:
        at = entry.facts["steps" if entry.stage == "finished" else "step"]
        if at < step and REMOVED not in entry.facts:
            found.fail(f"{what} has step {at} after step {step}")
        step, highest = at, max(highest, at)
    if most is not None and highest > most:
        found.fail(f"{what} took {highest} steps, more than {most}")


def _check_policy(session: Session, before: Entry | None, policy: Policy, found: Findings) -> None:
    assert session.evidence is not None
    found.expect(f"the policy of release-{session.number}.jwt", dict(session.release["policy"]), policy.as_dict())
    head = None if before is None else (before.sequence, before.digest)
    nonce, now = session.release["eat_nonce"], float(session.release["iat"])
    appraisal = appraise(session.evidence, policy, nonce=nonce, now=now, head=head)
    for failure in appraisal.failures:
        found.fail(f"the policy for session {session.number}, {failure.line()}")


def _check_unlike(sessions: Sequence[Session], found: Findings) -> None:
    """A nonce, a key or a release that is used twice was replayed."""
    values = {
        "key": [session.entries[0].keyid for session in sessions],
        "nonce": [session.claims["eat_nonce"] for session in sessions if "eat_nonce" in session.claims],
        "release": [session.release["jti"] for session in sessions if session.release],
    }
    for name, used in values.items():
        if len(set(used)) < len(used):
            found.fail(f"two sessions have the same {name}")
