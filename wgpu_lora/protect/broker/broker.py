"""The broker's decisions, the same for requests over HTTP and by files."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from filelock import FileLock, Timeout

from wgpu_lora.bounded import escape_unprintable
from wgpu_lora.errors import UserError, reason
from wgpu_lora.locks import lock_file
from wgpu_lora.protect.attestation.claims import MAX_BYTES, Evidence, read_evidence
from wgpu_lora.protect.broker.decision_log import DecisionLog, State
from wgpu_lora.protect.broker.release_token import make_release, token_digest
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.policies.appraisal import HEAD, KEYS, NONCE, appraise
from wgpu_lora.protect.policies.fields import shown
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.policies.result import Failure
from wgpu_lora.protect.sealed.keys import DataKey, PublicKey, SigningKey

MAX_NONCES = 1000  # open at the same time
NONCE_BYTES = 32
MAX_NAME = 200  # characters of a job's name
_DIGITS = re.compile("[0-9a-f]{64}")  # of nonces and digests


class Broker:
    """Holds a data key, and releases it to the sessions whose evidence passes the policy.

    Each decision is a line of the log, on disk before the caller learns of it: whatever a crash interrupts was either
    not decided, or stays decided. One process at a time works on a directory; its threads decide one after the other.

    Args:
        directory: of the log; made if it is not there.
        data_key: None for a broker that only hands out nonces.
        tell: called with a line about each decision.

    Raises:
        UserError: another process uses the directory, its log is not what this broker wrote, or the policy does not
            allow the data key as a recipient.
    """

    def __init__(
        self,
        directory: Path,
        policy: Policy,
        signing: SigningKey,
        data_key: DataKey | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        if data_key is not None and data_key.recipient not in policy.recipients:
            raise UserError(
                f"The policy '{escape_unprintable(policy.name)}' does not allow {data_key.recipient}, the data key, "
                "among the "
                "recipients: add it to 'recipients' in [release], or give the right key."
            )
        self.policy, self._signing, self._data_key, self._tell = policy, signing, data_key, tell
        self._turn = threading.Lock()
        self._held = _lock(directory)
        try:
            self._state = State()
            self._log = DecisionLog(directory, signing, self._state.apply, self._state.carried)
            self._clock = Clock(self._log.latest)
            self._clock.now()
            if self._log.cut:
                self._record("repaired", {"bytes": self._log.cut})
        except BaseException:
            self._held.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._held.release()

    @property
    def public(self) -> PublicKey:
        return self._signing.public

    @property
    def recipient(self) -> str | None:
        return self._data_key.recipient if self._data_key else None

    @property
    def head(self) -> str:
        """Where the log ends: the number of its part and of lines in it, and the SHA-256 of the last one."""
        return str(self._log.head)

    def check(self) -> None:
        """Raise UserError if nothing can be recorded or dated now."""
        with self._turn:
            self._clock.now()
            self._log.check()

    def note(self, stage: str, facts: Mapping[str, Any]) -> None:
        """Record the broker's start or end."""
        with self._turn:
            self._record(stage, facts)

    def nonce(self) -> str:
        """A new nonce: 32 random bytes in hexadecimal, to be used once, within `policy.nonce_seconds`.

        Raises:
            Refused: too many are open. UserError: nothing can be recorded or dated.
        """
        with self._turn:
            now = self._clock.now()
            self._state.forget(now)
            if len(self._state.nonces) >= MAX_NONCES:
                raise BrokerRefusal(f"The broker has {MAX_NONCES:,} open nonces: ask again later.", status=429)
            nonce = secrets.token_hex(NONCE_BYTES)
            expires = now + self.policy.nonce_seconds
            self._record("nonce", {"nonce_sha256": _sha256(nonce.encode()), "expires": expires})
            return nonce

    def decide(self, signed: bytes) -> str:
        """The release for a session's evidence, a token.

        Whatever is decided, the nonce in the evidence is used up.

        Raises:
            Refused: a rule failed; nothing is released. UserError: nothing can be recorded or dated.
        """
        evidence = _read(signed)
        with self._turn:
            if self._data_key is None:
                raise UserError("This broker has no data key: start it with --key.")
            if isinstance(evidence, Failure):
                self._clock.now()
                self._refuse({"request": "release", "evidence_sha256": _sha256(signed)}, [evidence], 400)
            return self._release(evidence)

    def progress(self, signed: bytes) -> None:
        """Record how far a job's evidence log has come, from a report signed by its newest session.

        Raises:
            Refused: it is not its newest session's, or goes back. UserError: nothing can be recorded or dated.
        """
        with self._turn:
            self._clock.now()
            facts = self._reported(signed)
            job = self._state.jobs[facts["job"]]
            if (facts["sequence"], facts["head"]) == job.newest:
                return  # asked twice
            if job.newest and facts["sequence"] <= job.newest[0]:
                failure = Failure("sequence", f"more than {job.newest[0]}", str(facts["sequence"]))
                self._refuse({"request": "progress", **facts}, [failure], 409)
            self._record("progress", facts)

    def _release(self, evidence: Evidence) -> str:
        now = self._clock.now()
        self._state.forget(now)
        name, nonce = str(_job(evidence).get("name")), evidence.claims.get("eat_nonce")
        known = self._state.jobs.get(name)
        facts = {
            "request": "release",
            "job": escape_unprintable(name)[:MAX_NAME],
            "evidence_sha256": evidence.sha256,
            "session": evidence.signing.keyid,
        }
        failures, token = [], ""
        if isinstance(nonce, str) and _DIGITS.fullmatch(nonce):
            facts["nonce_sha256"] = _sha256(nonce.encode())
        if facts.get("nonce_sha256") not in self._state.nonces:
            failures.append(Failure(NONCE, "a nonce of this broker, not used and not expired", "another"))
            nonce = None
        try:
            lines = known.lines if known else []
            result = appraise(evidence, self.policy, nonce=nonce, now=now, head=known.newest if known else None)
            failures += [*result.failures, *self._of_session(evidence, known is None)]
            if self._data_key is not None and not failures:
                token = make_release(evidence, result, self.policy, self._data_key, self._signing, now, lines)
        except Exception as error:  # the nonce is used all the same
            self._refuse(facts, [Failure("appraisal", "a result", f"an error ({type(error).__name__})")], 500)
        if failures or not token:
            self._refuse(facts, failures, 403)
        self._released(evidence, token, facts, now)
        return token

    def _of_session(self, evidence: Evidence, unknown: bool) -> Iterable[Failure]:
        """The rules that need the broker's memory or its keys."""
        name, resume = _job(evidence).get("name"), evidence.claims.get("resume")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            yield Failure("job.name", f"1 to {MAX_NAME} printable characters", shown(name))
        if resume is not None and not _is_place(resume):
            yield Failure(HEAD, "number and SHA-256 of a line", shown(resume))
        elif resume is not None and unknown:
            yield Failure(HEAD, "the first session of a job that this broker does not know", "one that resumes")
        if evidence.signing.keyid in self._state.sessions:
            yield Failure(KEYS, "new ephemeral keys", "those of an earlier session")
        if (released := len(self._state.sessions)) >= self.policy.sessions:
            yield Failure("release.sessions", f"at most {self.policy.sessions:g} releases", f"{released:,} before")
        if self.recipient not in _job(evidence).get("recipients", ()):
            yield Failure("release.recipients", f"{self.recipient}, the data key's, among the job's", "it is not")

    def _released(self, evidence: Evidence, token: str, facts: Mapping[str, Any], now: float) -> None:
        """Record a release; it must not be given away before."""
        released = {
            **facts,
            "session_key": evidence.signing.pem,
            "resume": evidence.claims.get("resume"),
            "release_sha256": token_digest(token),
            "expires": now + self.policy.release_seconds,
            "recipient": self.recipient,
            "level": evidence.claims["level"],
        }
        self._record("released", released, [("evidence", evidence.sha256)])
        self._tell(f"Released the key to the job '{facts['job']}', session {evidence.signing.keyid[:16]}.")

    def _reported(self, signed: bytes) -> dict[str, Any]:
        """The content of a report, if the newest session of its job signed it."""
        try:
            session = session_of(signed)
            name = self._state.sessions.get(session)
            if name is None:
                raise UserError("the key was not released to its session: attest first")
            job = self._state.jobs[name]
            if job.session != session:
                raise UserError("it is not of the job's newest session: end the older one")
            facts = read_progress(signed, PublicKey.parse(job.key))
            if (facts["job"], facts["session"]) != (name, session):
                raise UserError("it names another job than its session's: report the session's own")
        except UserError as error:
            failure = Failure("report", "one by the job's newest session", error.problem)
            self._refuse({"request": "progress"}, [failure], 400)
        return facts

    def _refuse(self, facts: Mapping[str, Any], failures: list[Failure], status: int) -> NoReturn:
        """Record a refusal, then raise it."""
        what = "the key" if facts["request"] == "release" else "the report"
        back = any(failure.rule == HEAD for failure in failures)
        cure = "resume the job's newest run, or give a new run another job name" if back else "mend that and ask again"
        said = f"The broker refused {what}, since {_rules(failures)} failed: {cure}."
        refused = BrokerRefusal(said, failures, status)
        self._record("refused", {**facts, "failures": refused.failures})
        self._tell(f"Refused {what}: {'; '.join(refused.lines[1:])}")
        raise refused

    def _record(self, stage: str, facts: Mapping[str, Any], subjects: Iterable[tuple[str, str]] = ()) -> None:
        policy = self.policy.as_dict()
        subjects = [("policy.toml", self.policy.sha256), *subjects]
        self._state.apply(self._log.append(stage, {**facts, "policy": policy}, subjects))


def _lock(directory: Path) -> FileLock:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return lock_file(directory / "lock").lock
    except Timeout:
        raise UserError(f"Another broker uses {directory}: stop it, or give --state another directory.") from None
    except OSError as error:
        raise UserError(f"{directory} cannot be used ({error.strerror}): give --state another directory.") from None


def _read(signed: bytes) -> Evidence | Failure:
    """Evidence, whose signature fits the key that it binds. Nobody has to be believed to say what it is."""
    try:
        return read_evidence(signed)
    except Exception as error:  # of any kind: these bytes come from anywhere
        said = error.problem if isinstance(error, UserError) else type(error).__name__
        return Failure("evidence", "a signed attestation", said)


def _job(evidence: Evidence) -> Mapping[str, Any]:
    job = evidence.claims.get("job")
    return job if isinstance(job, Mapping) else {}


def _is_place(resume: Any) -> bool:
    """Whether a claim names a line of an evidence log."""
    if not isinstance(resume, Mapping) or set(resume) != {"sequence", "head"}:
        return False
    sequence, head = resume["sequence"], resume["head"]
    return type(sequence) is int and 0 <= sequence < 1 << 53 and isinstance(head, str) and bool(_DIGITS.fullmatch(head))


def _rules(failures: list[Failure]) -> str:
    names = list(dict.fromkeys(failure.rule for failure in failures))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


CLOCK_SLACK = 5.0  # seconds; steps of time synchronisation are smaller


def _elapsed() -> float:
    """Seconds that no setting of the clock changes; on Linux they go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Clock:
    """The time, checked against the latest time in the log and against the time that passed in this process.

    Args:
        logged: the latest time in the log, in seconds since 1970.
    """

    def __init__(self, logged: float = 0.0) -> None:
        self._start, self._elapsed = time.time(), _elapsed()
        self._logged = logged

    def now(self) -> float:
        """Seconds since 1970.

        Raises:
            UserError: the clock shows an earlier time than before.
        """
        now, passed = time.time(), self._start + _elapsed() - self._elapsed
        if now + CLOCK_SLACK < max(self._logged, passed):
            behind = max(self._logged, passed) - now
            raise UserError(
                f"The clock of this machine was set back by {behind:,.0f} s, so that nothing can be dated: set it "
                "right and start the broker again, with a new --state directory if it had been ahead."
            )
        self._logged = max(self._logged, now)
        return max(now, passed)


LONGEST, MOST = 200, 20  # characters of a value, and failures, in a log or an answer


class BrokerRefusal(UserError):
    """A request that the broker refuses.

    Attributes:
        status: of the HTTP response. failures: the rules that failed, each with `rule`, `expected` and `found`.
    """

    def __init__(self, sentence: str, failures: Sequence[Failure] = (), status: int = 403) -> None:
        self.failures = [failure_facts(failure) for failure in failures[:MOST]]
        super().__init__(sentence, [failure_line(failure) for failure in self.failures])
        self.status = status


def failure_facts(failure: Failure) -> dict[str, str]:
    """A failure for logs and answers. Values from evidence are untrusted: they are shortened and made printable."""
    return {name: escape_unprintable(value)[:LONGEST] for name, value in failure.as_dict().items()}


def failure_line(failure: dict[str, Any]) -> str:
    """A line about a failure as `failure_facts` makes it."""
    return f"{failure['rule']}: expected {failure['expected']}, found {failure['found']}"


PROGRESS = "https://example.org/wgpu-lora/progress/v1"
_DIGEST = re.compile("[0-9a-f]{64}")


def sign_progress(job: str, sequence: int, head: str, key: SigningKey) -> bytes:
    """A DSSE envelope that says that the evidence log of a job has come to a line.

    Args:
        job: the job's name. sequence, head: number and SHA-256 of the line. key: of the session.
    """
    facts = {"job": job, "session": key.public.keyid, "sequence": sequence, "head": head}
    return dsse.sign(dsse.statement(PROGRESS, [("evidence.jsonl", head)], facts), key)


def session_of(signed: bytes) -> str:
    """The keyid that a report claims to be signed by. Raises EnvelopeError."""
    return str(_facts(dsse.peek(signed))["session"])


def read_progress(signed: bytes, key: PublicKey) -> dict[str, Any]:
    """`job`, `session`, `sequence` and `head` of a report that `key` signed. Raises EnvelopeError."""
    return _facts(dsse.verify(signed, key))


def _facts(statement: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = statement["predicate"]
    kinds = {"job": str, "session": str, "sequence": int, "head": str}
    wrong = statement["predicateType"] != PROGRESS or set(facts) != set(kinds)
    if wrong or any(type(facts[name]) is not kind for name, kind in kinds.items()):
        raise dsse.EnvelopeError("The report of progress has other fields than it should: update the trainer.")
    if not 0 <= facts["sequence"] < 1 << 53 or not _DIGEST.fullmatch(facts["head"]):
        raise dsse.EnvelopeError("The report of progress names no line of a log: update the trainer.")
    return facts


def nonce_for_files(policy: Path, signing: SigningKey, state: Path | None = None) -> str:
    """A nonce for evidence that comes as a file.

    Raises:
        UserError: the policy cannot be read, or the broker's directory cannot be used.
    """
    with Broker(state or default_state(policy), Policy.read(policy), signing) as broker:
        return broker.nonce()


def release_by_files(
    evidence: Path, policy: Path, data_key: DataKey, signing: SigningKey, state: Path | None = None
) -> str:
    """The release for evidence in a file: a token, to be written to the file that the trainer waits for.

    Args:
        state: directory of the broker's log, with the nonce that the evidence must state.

    Raises:
        UserError: a file cannot be read, the broker's directory cannot be used, or a rule failed.
    """
    signed = _evidence_bytes(evidence)
    with Broker(state or default_state(policy), Policy.read(policy), signing, data_key) as broker:
        return broker.decide(signed)


def _evidence_bytes(evidence: Path) -> bytes:
    try:
        if not evidence.is_file():  # opening a pipe would block
            raise UserError(f"{evidence} is not a file: give the evidence that the trainer wrote.")
        with evidence.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{evidence} cannot be read ({reason(error)}): check the path.") from None


def default_state(policy: Path) -> Path:
    """Where a broker of this policy has its log, if --state is not given."""
    return policy.with_name(f"{policy.name.removesuffix('.toml')}.broker")
