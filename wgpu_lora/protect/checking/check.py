"""`protect check`: verify a protected run from its directory alone, and say what that proves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import file_digest, sha256
from wgpu_lora.errors import UserError
from wgpu_lora.protect.checking.file_checks import check_cleanup, check_files
from wgpu_lora.protect.checking.session_checks import MAX_SMALL, Findings, Session, check_sessions, sessions_of
from wgpu_lora.protect.evidence import anchors, dsse, run_statement
from wgpu_lora.protect.evidence.model_signature import verify_model
from wgpu_lora.protect.evidence.run_evidence import CLEANUP, ENDS, NAME, read_log
from wgpu_lora.protect.evidence.run_statement import ADAPTER, RunFacts
from wgpu_lora.protect.evidence.signed_log import DamagedError, Entry, read_bytes
from wgpu_lora.protect.policies.appraisal import appraise_statement
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import PublicKey
from wgpu_lora.text import join_words

SIGNED = {"finished": "finished", "failed": "failed", "interrupted": "was interrupted"}
UNPROVABLE = (
    "that this software ran unchanged and nothing else did, so that what was signed is what happened, the machine's "
    "clock, and the run's figures"
)


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes:
        run: the run's id, "" if the log cannot be read. end: finished, failed, interrupted, or None.
        broker: the keyid that endorses the sessions; None if no broker's key was given.
        proven, claimed, failures: sentences.
        session_key: of the last session, in PEM; it signed the adapter.
    """

    run: str
    end: str | None
    broker: str | None
    proven: list[str]
    claimed: list[str]
    failures: list[str]
    session_key: str | None = None

    @property
    def verified(self) -> bool:
        return not self.failures

    def line(self) -> str:
        """What is proven, and what is only claimed, in one line."""
        if self.failures:
            count = len(self.failures)
            return f"not verified: {count} {'part' if count == 1 else 'parts'} of the evidence failed"
        claimed = f"only claimed: {'; '.join(self.claimed)}"
        if self.broker is None:
            return f"proven: nothing but that the files fit each other, since no broker's key was given; {claimed}"
        return f"proven, by the broker's key {self.broker[:12]}: {'; '.join(self.proven)}; {claimed}"

    def to_json(self) -> dict[str, Any]:
        return {"verified": self.verified, **asdict(self), "line": self.line()}


def check(
    run: Path, broker: PublicKey | None = None, policy: Policy | None = None, adapter: Path | None = None
) -> CheckResult:
    """Verify all of a run's evidence, offline.

    Args:
        run: its directory. broker: the key that must have signed its releases; without it nobody endorses the keys.
        policy: that the releases must have been made under, and that the evidence is appraised by again.
        adapter: the directory of the opened adapter.

    Raises:
        UserError: `run` is not a protected run's directory, or `adapter` is not a directory of files.
    """
    if not (run / NAME).exists():
        raise UserError(f"{run} has no {NAME}: give the output directory of a protected run.")
    if adapter is not None and not adapter.is_dir():
        raise UserError(
            f"{adapter} is not a directory: give the one into which wgpu-lora protect open put the adapter."
        )
    for path in adapter.rglob("*") if adapter else ():
        if path.is_symlink() or not (path.is_file() or path.is_dir()):  # which could be read without an end
            raise UserError(f"{path} is a link or a special file: open the sealed adapter anew.")
    found, keyid = Findings(), broker.keyid if broker else None
    try:
        entries = read_log(run / NAME)
    except DamagedError as error:
        return CheckResult("", None, keyid, [], [], [error.problem])
    if not entries:
        return CheckResult("", None, keyid, [], [], [f"{NAME} has no complete line"])
    sessions = sessions_of(entries)
    found.proven.append(f"the log's {len(entries)} lines are complete up to its end and in order")
    check_sessions(run, sessions, broker, policy, found)
    if not sessions[-1].named("released"):  # an earlier session's lines are endorsed by the next one's release
        found.fail(f"session {len(sessions)} has no release: nobody endorses its lines")
    check_files(run, sessions, found)
    check_cleanup(run, sessions, found)
    end = _check_end(run, sessions, policy, adapter, found)
    if end is not None:
        found.proven.insert(0, f"its last session signed that the run {SIGNED[end]}")
    with found.part("the claims"):
        _describe_sessions(sessions, broker, policy, found)
    if adapter is None and end == "finished":
        found.claimed.append("the digests of the adapter's files: no opened adapter was given")
    if broker is None:  # whoever made all of it could have made it fit
        found.claimed, found.proven = [*found.proven, *found.claimed], []
    with found.part("the anchor"):
        if anchors.check(entries[0].chain, [entry.digest for entry in entries]):
            found.proven.append("this is the newest state that this machine wrote")
        else:
            found.claimed.append("that this is the run's newest state: no anchor on this machine")
    proven = [] if found.failures else found.proven
    return CheckResult(entries[0].chain, end, keyid, proven, found.claimed, found.failures, sessions[-1].key.pem)


def _describe_sessions(
    sessions: Sequence[Session], broker: PublicKey | None, policy: Policy | None, found: Findings
) -> None:
    count = sum(bool(session.release) for session in sessions)
    what = "1 session's key was" if count == 1 else f"{count} sessions' keys were"
    if broker is not None:
        found.proven.append(f"{what} attested to the broker, which released the data's key to them")
    else:
        found.claimed.append(f"that {what} attested to a broker: no broker's key was given")
    if policy is not None:
        name = f"{policy['policy.name']}, version {policy['policy.version']}"
        found.proven.append(f"the evidence passes the policy {name}")
    for level, number in Counter(str(session.claims.get("level")) for session in sessions).items():
        which = "every session" if number == len(sessions) else f"{number} of {len(sessions)} sessions"
        if level == "quoted" and policy is not None and policy["attestation.tpm_keys"]:
            found.proven.append(f"the claims of {which} were quoted by a TPM of the policy")
        elif level == "quoted":  # anybody can run a TPM in software
            found.claimed.append(f"that the TPM which quoted the claims of {which} is real: no policy names its key")
        else:
            found.claimed.append(f"the claims of {which} about its software and device ({level})")
    versions = [session.claims.get("package", {}).get("version") for session in sessions]
    if any(versions):
        found.claimed.append(f"its version, wgpu-lora {join_words(sorted(set(map(str, versions))))}")
    found.claimed.append(UNPROVABLE)


# -- the end of a run --------------------------------------------------------------------------------------------------


def _check_end(
    run: Path, sessions: Sequence[Session], policy: Policy | None, adapter: Path | None, found: Findings
) -> str | None:
    """Verify how a run ended, and say it; None if it has no end."""
    ends, last = sessions[-1].named(*ENDS), sessions[-1]
    if not ends:
        found.fail("the run has no end: it was killed, is still running, or the end of its log was cut off")
        return None
    end = ends[-1]
    if end.stage != "finished":
        if (run / run_statement.NAME).exists():
            found.fail(f"{run_statement.NAME} is there although the log's end is {end.stage!r}")
        return end.stage
    with found.part("the line 'finished'"):
        names = {item.name for item in fields(RunFacts)}
        for name in sorted(names ^ set(end.facts)):
            found.fail(f"the line 'finished' {'lacks' if name in names else 'has the unknown fact'} {name!r}")
        for name in ("initial_loss", "final_loss", "best_loss", "elapsed_seconds"):
            value = end.facts.get(name)
            if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
                found.fail(f"{name} is {value!r:.40}")
        if end.facts.get("final_loss") is None:
            found.fail("the run has no finite final loss")
    with found.part(run_statement.NAME):
        statement = _check_statement(run, sessions, end, adapter, found)
        if policy is not None and last.evidence is not None:
            for failure in appraise_statement(statement, last.evidence, policy, now=end.seconds).failures:
                found.fail(f"the policy for the statement, {failure.line()}")
    if adapter is not None:
        with found.part("the adapter"):
            verify_model(adapter, last.key)
            found.proven.append("the adapter's files are those that the session signed (OpenSSF model signing)")
    return "finished"


def _check_statement(
    run: Path, sessions: Sequence[Session], end: Entry, adapter: Path | None, found: Findings
) -> dict[str, Any]:
    """The statement agrees with the log in every field."""
    statement = dsse.verify(read_bytes(run / run_statement.NAME, MAX_SMALL), sessions[-1].key)
    found.expect(f"the predicate type of {run_statement.NAME}", statement["predicateType"], run_statement.KIND)
    entries = [entry for session in sessions for entry in session.entries]
    cleanup = sha256(read_bytes(run / CLEANUP, MAX_SMALL))
    expected = run_statement.provenance(entries, sessions[-1].claims, cleanup, end.facts)
    agrees = found.expect(run_statement.NAME, statement["predicate"], expected)
    subjects = {item["name"]: item["digest"]["sha256"] for item in statement["subject"]}
    sealed = {name: digest for name, digest in subjects.items() if not name.startswith(ADAPTER)}
    plain = {name.removeprefix(ADAPTER): digest for name, digest in subjects.items() if name not in sealed}
    agrees &= found.expect("the sealed adapter of the statement", sealed, dict(end.subjects))
    if not plain or not sealed:
        found.fail(f"{run_statement.NAME} names no file of the adapter")
    if adapter is not None:
        files = [path for path in adapter.rglob("*") if not path.is_dir()]
        digests = {path.relative_to(adapter).as_posix(): file_digest(path) for path in files}
        found.expect(f"SHA-256 of the adapter {adapter}", digests, plain)
    if agrees:
        found.proven.append("the statement agrees with the log and the evidence")
    return statement
