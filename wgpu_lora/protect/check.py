"""`protect check`: verify a protected run from its directory alone, and say what that proves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import file_digest, sha256
from wgpu_lora.files.paths import is_path, links_outside
from wgpu_lora.files.typed_json import typed
from wgpu_lora.names.text import count_noun, escape_unprintable, join_words
from wgpu_lora.protect.evidence import anchors, dsse, model_signature, run_statement
from wgpu_lora.protect.evidence.model_signature import verify_model
from wgpu_lora.protect.evidence.run_evidence import CLEANUP, CLEANUP_KIND, ENDS, NAME, read_log
from wgpu_lora.protect.evidence.run_statement import ADAPTER, RunFacts
from wgpu_lora.protect.evidence.signed_log import DamagedError, Entry, read_bytes
from wgpu_lora.protect.policies.appraisal import appraise_statement
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import PublicKey
from wgpu_lora.protect.session_checks import MAX_SMALL, Findings, Session, check_sessions, sessions_of

MADE = ("started", "checkpoint", "evaluated", *ENDS)  # stages whose subjects the run itself sealed
SEALED = ".age"
JOB = "job.toml"  # a copy
OWN = {NAME, CLEANUP, JOB, run_statement.NAME, model_signature.NAME}
_OF_SESSION = re.compile(r"evidence-\d+\.json|release-\d+\.jwt")  # compared with the log by session_checks
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
            return f"not verified: {count_noun(len(self.failures), 'part')} of the evidence failed"
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
    findings, keyid = Findings(), broker.keyid if broker else None
    try:
        entries = read_log(run / NAME)
    except DamagedError as error:
        return CheckResult("", None, keyid, [], [], [error.problem])
    if not entries:
        return CheckResult("", None, keyid, [], [], [f"{NAME} has no complete line"])
    sessions = sessions_of(entries)
    findings.proven.append(f"the log's {len(entries)} lines are complete up to its end and in order")
    check_sessions(run, sessions, broker, policy, findings)
    if not sessions[-1].entries_of("released"):  # an earlier session's lines are endorsed by the next one's release
        findings.fail(f"session {len(sessions)} has no release: nobody endorses its lines")
    _check_files(run, sessions, findings)
    _check_cleanup(run, sessions, findings)
    end = _check_end(run, sessions, policy, adapter, findings)
    if end is not None:
        findings.proven.insert(0, f"its last session signed that the run {SIGNED[end]}")
    with findings.part("the claims"):
        _describe_sessions(sessions, broker, policy, findings)
    if adapter is None and end == "finished":
        findings.claimed.append("the digests of the adapter's files: no opened adapter was given")
    if broker is None:  # whoever made all of it could have made it fit
        findings.claimed, findings.proven = [*findings.proven, *findings.claimed], []
    with findings.part("the anchor"):
        if anchors.check(entries[0].chain, [entry.digest for entry in entries]):
            findings.proven.append("this is the newest state that this machine wrote")
        else:
            findings.claimed.append("that this is the run's newest state: no anchor on this machine")
    proven = [] if findings.failures else findings.proven
    return CheckResult(entries[0].chain, end, keyid, proven, findings.claimed, findings.failures, sessions[-1].key.pem)


def _describe_sessions(
    sessions: Sequence[Session], broker: PublicKey | None, policy: Policy | None, findings: Findings
) -> None:
    count = sum(bool(session.release) for session in sessions)
    subject = count_noun(count, "session's key was", "sessions' keys were")
    if broker is not None:
        findings.proven.append(f"{subject} attested to the broker, which released the data's key to them")
    else:
        findings.claimed.append(f"that {subject} attested to a broker: no broker's key was given")
    if policy is not None:
        name = f"{policy['policy.name']}, version {policy['policy.version']}"
        findings.proven.append(f"the evidence passes the policy {name}")
    for level, number in Counter(str(session.claims.get("level")) for session in sessions).items():
        share = "every session" if number == len(sessions) else f"{number} of {len(sessions)} sessions"
        if level == "quoted" and policy is not None and policy["attestation.tpm_keys"]:
            findings.proven.append(f"the claims of {share} were quoted by a TPM of the policy")
        elif level == "quoted":  # anybody can run a TPM in software
            findings.claimed.append(f"that the TPM which quoted the claims of {share} is real: no policy names its key")
        else:
            findings.claimed.append(f"the claims of {share} about its software and device ({level})")
    versions = [session.claims.get("package", {}).get("version") for session in sessions]
    if any(versions):
        findings.claimed.append(f"its version, wgpu-lora {join_words(sorted(set(map(str, versions))))}")
    findings.claimed.append(UNPROVABLE)


# -- files: sealed ones by the digests that the log has of them, and the cleanup record --------------------------------


def _check_files(run: Path, sessions: Sequence[Session], findings: Findings) -> None:
    """Verify all sealed files against the newest digests that the log has of them.

    Older checkpoints may have been removed, as training does; the newest one, and what the end names, must be there.
    """
    logged = {
        name: digest for session in sessions for line in session.entries_of(*MADE) for name, digest in line.subjects
    }
    checkpoints = [line for session in sessions for line in session.steps()]
    required = {name for line in [*checkpoints[-1:], *sessions[-1].entries_of(*ENDS)] for name, _ in line.subjects}
    verified = 0
    for name, digest in logged.items():
        with findings.part(name):
            actual = _digest_in(run, name)
            if actual is not None:
                verified += findings.expect(f"SHA-256 of {name}", actual, digest)
            elif name in required:
                findings.fail(f"{name} is missing")
    # Links and special files too: whatever lies here may be taken for a part of the run.
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_symlink() or not path.is_dir()}
    extra_names = []
    for name in sorted(files - OWN - set(logged)):
        if name.endswith(SEALED) and sessions[-1].entries_of("wiped"):
            findings.fail(f"{name} is not in the log")
        elif name.endswith(SEALED):
            findings.claimed.append(f"{name}: a killed session had not recorded it")
        elif not name.endswith(".lock") and not _OF_SESSION.fullmatch(name):
            extra_names.append(name)
    if extra_names:
        names = escape_unprintable(join_words(extra_names))[:400]
        findings.claimed.append(f"nothing about files that the evidence does not cover: {names}")
    with findings.part(JOB):
        copy = _digest_in(run, JOB)
        if copy is None:
            findings.claimed.append(f"{JOB} is missing: the evidence states its options")
        else:
            findings.expect(f"SHA-256 of {JOB}", copy, sessions[-1].claims.get("job", {}).get("sha256"))
    if verified:
        findings.proven.append(f"{count_noun(verified, 'sealed file is', 'sealed files are')} those of the log")


def _check_cleanup(run: Path, sessions: Sequence[Session], findings: Findings) -> None:
    """Verify that sessions which were not killed have a complete cleanup record; the file is the last one's."""
    for session in sessions:
        label = f"session {session.number}"
        with findings.part(f"the cleanup of {label}"):
            lines = session.entries_of("wiped")
            if lines:
                _check_record(lines[0].facts, label, findings)
            elif session is not sessions[-1]:
                findings.claimed.append(f"{label} was killed: it has no cleanup record")
            elif session.entries_of(*ENDS):
                findings.fail(f"{label} ended without a cleanup record")
    last = sessions[-1]
    for line in last.entries_of("wiped")[:1]:
        with findings.part(CLEANUP):
            data = read_bytes(run / CLEANUP, MAX_SMALL)
            findings.expect(f"SHA-256 of {CLEANUP}", sha256(data), dict(line.subjects).get(CLEANUP))
            statement = dsse.verify(data, last.key)
            findings.expect(f"the predicate type of {CLEANUP}", statement["predicateType"], CLEANUP_KIND)
            findings.expect(CLEANUP, statement["predicate"], {"session": last.number, **line.facts})


def _check_record(record: dict[str, object], label: str, findings: Findings) -> None:
    for name in ("wiped", "not_wiped"):
        if not isinstance(record.get(name), list) or not record[name]:
            findings.fail(f"the cleanup record of {label} does not say what was {name.replace('_', ' ')}")
    if record.get("complete") is not True:
        findings.fail(f"the cleanup of {label} is not complete: {record.get('not_wiped')!s:.200}")


def _digest_in(directory: Path, name: str) -> str | None:
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


# -- the end of a run --------------------------------------------------------------------------------------------------


def _check_end(
    run: Path, sessions: Sequence[Session], policy: Policy | None, adapter: Path | None, findings: Findings
) -> str | None:
    """Verify how a run ended, and say it; None if it has no end."""
    ends, last = sessions[-1].entries_of(*ENDS), sessions[-1]
    if not ends:
        findings.fail("the run has no end: it was killed, is still running, or the end of its log was cut off")
        return None
    end = ends[-1]
    if end.stage != "finished":
        if (run / run_statement.NAME).exists():
            findings.fail(f"{run_statement.NAME} is there although the log's end is {end.stage!r}")
        return end.stage
    with findings.part("the line 'finished'"):
        facts = asdict(typed(RunFacts, end.facts, "the line", unknown="refuse"))
        findings.expect("the line 'finished'", end.facts, facts)
        if facts["final_loss"] is None:
            findings.fail("the run has no finite final loss")
    with findings.part(run_statement.NAME):
        statement = _check_statement(run, sessions, end, adapter, findings)
        if policy is not None and last.evidence is not None:
            for failure in appraise_statement(statement, last.evidence, policy, now=end.seconds).failures:
                findings.fail(f"the policy for the statement, {failure.line()}")
    if adapter is not None:
        with findings.part("the adapter"):
            verify_model(adapter, last.key)
            findings.proven.append("the adapter's files are those that the session signed (OpenSSF model signing)")
    return "finished"


def _check_statement(
    run: Path, sessions: Sequence[Session], end: Entry, adapter: Path | None, findings: Findings
) -> dict[str, Any]:
    """The statement agrees with the log in every field."""
    statement = dsse.verify(read_bytes(run / run_statement.NAME, MAX_SMALL), sessions[-1].key)
    findings.expect(f"the predicate type of {run_statement.NAME}", statement["predicateType"], run_statement.KIND)
    entries = [entry for session in sessions for entry in session.entries]
    cleanup = sha256(read_bytes(run / CLEANUP, MAX_SMALL))
    expected = run_statement.provenance(entries, sessions[-1].claims, cleanup, end.facts)
    agrees = findings.expect(run_statement.NAME, statement["predicate"], expected)
    subjects = {item["name"]: item["digest"]["sha256"] for item in statement["subject"]}
    sealed = {name: digest for name, digest in subjects.items() if not name.startswith(ADAPTER)}
    plain = {name.removeprefix(ADAPTER): digest for name, digest in subjects.items() if name not in sealed}
    agrees &= findings.expect("the sealed adapter of the statement", sealed, dict(end.subjects))
    if not plain or not sealed:
        findings.fail(f"{run_statement.NAME} names no file of the adapter")
    if adapter is not None:
        files = [path for path in adapter.rglob("*") if not path.is_dir()]
        digests = {path.relative_to(adapter).as_posix(): file_digest(path) for path in files}
        findings.expect(f"SHA-256 of the adapter {adapter}", digests, plain)
    if agrees:
        findings.proven.append("the statement agrees with the log and the evidence")
    return statement
