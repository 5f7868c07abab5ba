"""The sessions of a run: whose keys signed the log, and who endorsed them.

A session's key is believed because its evidence binds it, and because the broker, which appraised that evidence, signed
a release for it. A resumed session's evidence states the log's end, so that each release endorses all lines before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import sha256
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.protect.attestation.claims import Evidence, read_evidence
from wgpu_lora.protect.broker.release_token import SLACK, answer_to, missing_line, read_release
from wgpu_lora.protect.evidence.run_evidence import ENDS
from wgpu_lora.protect.evidence.signed_log import Entry, read_bytes
from wgpu_lora.protect.policies.appraisal import appraise
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import PublicKey

BEFORE_RELEASE = ("attested", "released", "leftovers", "failed", "interrupted", "wiped")
STEPS = "checkpoints/"
REMOVED = "removed"  # the fact of a line that names an older checkpoint, since the run went back to it
BACK = 1.0  # seconds by which the clock may go back between two lines
MAX_SMALL = 8 << 20  # bytes of a file of evidence
MAX_SHOWN = 70  # characters of a value in a message
MISSING = type("Missing", (), {"__repr__": lambda self: "missing"})()


@dataclass
class Findings:
    """Sentences without a full stop. A run is verified if none failed."""

    proven: list[str] = field(default_factory=list)
    claimed: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def fail(self, sentence: str) -> None:
        self.failures.append(escape_unprintable(sentence))

    def expect(self, label: str, actual: Any, expected: Any) -> bool:
        """Fail unless two values are equal; of mappings and lists, each part that differs is named."""
        differences = list(_differences(label, actual, expected))
        for where, *values in differences:
            actual_text, expected_text = (
                text if len(text := repr(v)) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..." for v in values
            )
            self.fail(f"{where} is {actual_text}, expected {expected_text}")
        return not differences

    @contextmanager
    def part(self, label: str) -> Iterator[None]:
        """What cannot be read, or has another form, fails here, and the check goes on with the next part."""
        try:
            yield
        except UserError as error:
            self.fail(f"{label}: {error.lines[0]}")
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            self.fail(f"{label} has not the form it must have ({type(error).__name__}: {error!s:.100})")


def _differences(where: str, actual: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        for name in sorted({*actual, *expected}, key=str):
            yield from _differences(f"{where}.{name}", actual.get(name, MISSING), expected.get(name, MISSING))
    elif isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        for number, (actual_item, expected_item) in enumerate(zip(actual, expected, strict=True)):
            yield from _differences(f"{where}[{number}]", actual_item, expected_item)
    elif type(actual) is not type(expected) or actual != expected:
        yield where, actual, expected


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
        return [
            entry
            for entry in self.entries_of("checkpoint")
            if (entry.subjects[0][0].startswith(STEPS) if entry.subjects else REMOVED in entry.facts)
        ]

    def entries_of(self, *stages: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.stage in stages]


def sessions_of(entries: Sequence[Entry]) -> list[Session]:
    """A log's lines by session; the first line of a verified log is `attested`."""
    sessions: list[Session] = []
    for entry in entries:
        if entry.stage == "attested":
            sessions.append(Session(len(sessions) + 1, []))
        sessions[-1].entries.append(entry)
    return sessions


def check_sessions(
    run: Path, sessions: Sequence[Session], broker: PublicKey | None, policy: Policy | None, findings: Findings
) -> None:
    """Verify evidence, releases, and what the lines of a session say about each other."""
    before: Entry | None = None
    for session in sessions:
        number, earlier = session.number, sessions[: session.number - 1]
        with findings.part(f"evidence-{number}.json"):
            _check_evidence(run, session, before, findings)
        with findings.part(f"release-{number}.jwt"):
            _check_release(run, session, broker, earlier, findings)
        with findings.part(f"session {number}"):
            _check_stages(session, findings)
            _check_data(session, findings)
            _check_steps(session, earlier, findings)
        if policy is not None and session.evidence is not None and session.release:
            with findings.part(f"the policy for session {number}"):
                _check_policy(session, session.evidence, before, policy, findings)
        if earlier:
            findings.expect(f"the job of session {number}", session.claims.get("job"), sessions[0].claims.get("job"))
        before = session.entries[-1]
    # What is used twice was replayed.
    for name, values in {
        "key": [session.entries[0].keyid for session in sessions],
        "nonce": [session.claims["eat_nonce"] for session in sessions if "eat_nonce" in session.claims],
        "release": [session.release["jti"] for session in sessions if session.release],
    }.items():
        if len(set(values)) < len(values):
            findings.fail(f"two sessions have the same {name}")
    for line, next_line in pairwise(entry for session in sessions for entry in session.entries):
        if next_line.seconds < line.seconds - BACK:
            findings.fail(
                f"the clock went back by {line.seconds - next_line.seconds:,.0f} s at line {next_line.sequence + 1}"
            )


def _check_evidence(run: Path, session: Session, before: Entry | None, findings: Findings) -> None:
    line, name = session.entries[0], f"evidence-{session.number}.json"
    data = read_bytes(run / name, MAX_SMALL)
    findings.expect(f"the evidence of session {session.number} in the log", line.facts.get("evidence"), name)
    if not findings.expect(f"SHA-256 of {name}", sha256(data), line.facts.get("evidence_sha256")):
        return
    session.evidence = evidence = read_evidence(data)
    findings.expect(f"the key that {name} binds", evidence.signing.keyid, line.keyid)
    expected = {} if before is None else {"sequence": before.sequence, "head": before.digest}
    findings.expect(f"the end of the log that {name} states", dict(evidence.claims.get("resume") or {}), expected)
    delay = line.seconds - float(evidence.claims["iat"])
    if not -SLACK <= delay <= SLACK:
        findings.fail(f"{name} was made {delay:,.0f} s before the log's line that names it")


def _check_release(
    run: Path, session: Session, broker: PublicKey | None, earlier: Sequence[Session], findings: Findings
) -> None:
    number, name = session.number, f"release-{session.number}.jwt"
    lines = session.entries_of("released")
    if not lines:
        return  # _check_stages: then it may do nothing that needs a release
    data = read_bytes(run / name, MAX_SMALL)
    findings.expect(f"the release of session {number} in the log", lines[0].facts.get("release"), name)
    if len(lines) != 1 or not findings.expect(f"SHA-256 of {name}", sha256(data), lines[0].facts.get("release_sha256")):
        return
    session.release = release = read_release(data.decode("ascii"), broker)
    claims, evidence = session.claims, session.evidence
    signer, session_keyid = broker.keyid if broker else release["iss"], session.entries[0].keyid
    expected = answer_to(evidence.sha256 if evidence else None, claims.get("eat_nonce"), signer, session_keyid)
    expected["sub"] = claims.get("job", {}).get("name")
    for key, value in expected.items():
        findings.expect(f"{key} of {name}", release[key], value)
    if release["recipient"] not in claims.get("job", {}).get("recipients", []):
        findings.fail(f"the key that {name} released is not among the job's recipients")
    request_time = session.entries[0].seconds
    use_time = max(line.seconds for line in session.entries_of("released", "opened"))
    if use_time >= release["exp"]:
        findings.fail(f"{name} had expired {use_time - release['exp']:,.0f} s before it was used")
    if not request_time - SLACK <= release["iat"] <= use_time + SLACK:
        findings.fail(f"{name} was not issued between the attestation of session {number} and its use")
    # The log has the lines that the broker knew; else it was put back, and went on otherwise.
    digests = [entry.digest for previous in earlier for entry in previous.entries]
    if (missing := missing_line(release, digests)) is not None:
        findings.fail(f"the broker knew another line {missing + 1} before session {number} than the log has")


def _check_stages(session: Session, findings: Findings) -> None:
    """The order of a session's lines."""
    label, stages = f"session {session.number}", [entry.stage for entry in session.entries]
    first = stages.index("released") if "released" in stages else len(stages)
    for stage in stages[:first]:
        if stage not in BEFORE_RELEASE:
            findings.fail(f"{label} has the line {stage!r} before any release")
    for stage in ("released", *ENDS, "wiped"):
        if stages.count(stage) > 1:
            findings.fail(f"{label} has {stages.count(stage)} lines {stage!r}")
    for end, next_stage in pairwise(stages):
        if end in ENDS and next_stage != "wiped":
            findings.fail(f"{label} goes on with {next_stage!r} after it {end}")
    if "wiped" in stages[:-1]:
        findings.fail(f"{label} goes on after its cleanup")


def _check_data(session: Session, findings: Findings) -> None:
    label, lines = f"session {session.number}", session.entries_of("opened")
    if not lines:
        if session.entries_of("started", "resumed", "checkpoint", "finished"):
            findings.fail(f"{label} trained without opening data")
        return
    expected = sorted(item["sha256"] for item in session.claims.get("job", {}).get("data", []))
    findings.expect(f"the data of {label}", sorted(digest for line in lines for _, digest in line.subjects), expected)
    min_rows, rows = session.release.get("min_rows"), max(line.facts.get("trained_rows", 0) for line in lines)
    if min_rows is not None and rows < min_rows:
        findings.fail(f"{label} trained on {rows} rows, fewer than {min_rows}")


def _check_steps(session: Session, earlier: Sequence[Session], findings: Findings) -> None:
    """The checkpoint that a session goes on from, and its steps."""
    label, max_steps = f"session {session.number}", session.release.get("max_steps")
    last = next((entry for previous in reversed(earlier) for entry in reversed(previous.steps())), None)
    for entry in session.entries_of("resumed"):
        if last is None or not last.subjects:
            findings.fail(f"{label} resumed from a checkpoint that no earlier session made")
        else:
            findings.expect(f"the checkpoint that {label} resumed from", entry.subjects, last.subjects)
            findings.expect(f"the step that {label} resumed from", entry.facts.get("step"), last.facts.get("step"))
    if last and last.subjects and session.entries_of("started"):
        findings.fail(f"{label} started anew though there was a checkpoint")
    step = highest = last.facts["step"] if last else 0
    for entry in [*session.steps(), *session.entries_of("finished")]:
        at = entry.facts["steps" if entry.stage == "finished" else "step"]
        if at < step and REMOVED not in entry.facts:
            findings.fail(f"{label} has step {at} after step {step}")
        step, highest = at, max(highest, at)
    if max_steps is not None and highest > max_steps:
        findings.fail(f"{label} took {highest} steps, more than {max_steps}")


def _check_policy(
    session: Session, evidence: Evidence, before: Entry | None, policy: Policy, findings: Findings
) -> None:
    findings.expect(f"the policy of release-{session.number}.jwt", dict(session.release["policy"]), policy.as_dict())
    head = None if before is None else (before.sequence, before.digest)
    nonce, now = session.release["eat_nonce"], float(session.release["iat"])
    for failure in appraise(evidence, policy, nonce=nonce, now=now, head=head).failures:
        findings.fail(f"the policy for session {session.number}, {failure.line()}")
