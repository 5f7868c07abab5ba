"""The broker's decisions, the same for requests over HTTP and by files."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from filelock import Timeout

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import sha256
from wgpu_lora.files.locks import lock_file
from wgpu_lora.files.typed_json import SHA256, Count, Sha256, typed
from wgpu_lora.names.text import escape_unprintable, join_words
from wgpu_lora.protect.attestation.claims import Evidence, read_evidence
from wgpu_lora.protect.broker.decision_log import DecisionLog
from wgpu_lora.protect.broker.release_token import make_release
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.policies.appraisal import HEAD, KEYS, NONCE, Failure, appraise
from wgpu_lora.protect.policies.claim_checks import claim_or_none, value_text
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import DataKey, PublicKey, SigningKey

MAX_NONCES = 1000  # open at the same time
MAX_NAME = 200  # characters of a job's name
LONGEST, MOST = 200, 20  # characters of a value, and failures, in a log or an answer
CLOCK_SLACK = 5.0  # seconds; steps of time synchronisation are smaller
PROGRESS = "https://example.org/wgpu-lora/progress/v1"


class BrokerRefusal(UserError):
    """A request that the broker refuses.

    Attributes:
        status: of the HTTP response. failures: the rules that failed, each with `rule`, `expected` and `found`; values
            from evidence are untrusted, so they are shortened and made printable.
    """

    def __init__(self, sentence: str, failures: Sequence[Failure] = (), status: int = 403) -> None:
        self.failures = [
            {name: escape_unprintable(value)[:LONGEST] for name, value in asdict(failure).items()}
            for failure in failures[:MOST]
        ]
        super().__init__(sentence, [Failure(**failure).line() for failure in self.failures])
        self.status = status


class Clock:
    """The time in seconds since 1970, which goes on as the time that passed in this process does.

    Args:
        logged: the latest time in a log.
    """

    def __init__(self, logged: float = 0.0) -> None:
        self._begin, self._logged = time.time() - self._elapsed(), logged

    @staticmethod
    def _elapsed() -> float:
        """Seconds that no setting of the clock changes; on Linux they go on while the machine sleeps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()

    def latest(self) -> float:
        """The time, which is not set back if the machine's is."""
        return max(time.time(), self._begin + self._elapsed())

    def now(self) -> float:
        """The time. Raises UserError if the machine's clock shows an earlier one than before."""
        now, steady_time = time.time(), self._begin + self._elapsed()
        floor = max(self._logged, steady_time)
        if now + CLOCK_SLACK < floor:
            raise UserError(
                f"The clock of this machine was set back by {floor - now:,.0f} s, so that nothing can be dated: set it "
                "right and start the broker again, with a new --state directory if it had been ahead."
            )
        self._logged = max(self._logged, now)
        return max(now, steady_time)


# -- reports of progress -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogPosition:
    """A line of an evidence log: its number, and its SHA-256."""

    sequence: Count
    head: Sha256


@dataclass(frozen=True)
class LogProgress(LogPosition):
    """How far a job's evidence log has come, as its session reports it, so that it cannot be put back unnoticed.

    job: its name. session: keyid.
    """

    job: str
    session: str


def sign_progress(job: str, sequence: int, head: str, key: SigningKey) -> bytes:
    """A report, signed by the session's key. Arguments as the fields of `LogProgress`."""
    facts = asdict(LogProgress(sequence, head, job, key.public.keyid))
    return dsse.sign(dsse.statement(PROGRESS, [("evidence.jsonl", head)], facts), key)


# -- decisions ---------------------------------------------------------------------------------------------------------


class Broker:
    """Holds a data key, and releases it to the sessions whose evidence passes the policy.

    Each decision is a line of the log, on disk before the caller learns of it: whatever a crash interrupts was either
    not decided, or stays decided. One process at a time works on a directory; its threads decide one after the other.

    Args:
        directory: of the log; made if it is not there. data_key: None for a broker that only hands out nonces.
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
        if data_key is not None and data_key.recipient not in policy["release.recipients"]:
            raise UserError(
                f"The policy '{escape_unprintable(policy['policy.name'])}' does not allow {data_key.recipient}, the "
                "data key, among the recipients: add it to 'recipients' in [release], or give the right key."
            )
        self.directory, self.policy, self._tell = directory, policy, tell
        self._signing, self._data_key = signing, data_key
        self._turn = threading.Lock()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock_file(directory / "lock").lock
        except Timeout:
            raise UserError(f"Another broker uses {directory}: stop it, or give --state another directory.") from None
        except OSError as error:
            raise UserError(f"{directory} cannot be used ({error.strerror}): give --state another directory.") from None
        try:
            self._log = DecisionLog(directory, signing)
            self._state, self._clock = self._log.state, Clock(self._log.latest)
            self._clock.now()
            if self._log.cut:
                self._record("repaired", {"bytes": self._log.cut})
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()

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
        """A new nonce: 32 random bytes in hexadecimal, to be used once, within `nonce.seconds` of the policy. Raises
        BrokerRefusal: too many are open. UserError: nothing can be recorded or dated."""
        with self._turn:
            now = self._clock.now()
            self._state.forget(now)
            if len(self._state.nonces) >= MAX_NONCES:
                raise BrokerRefusal(f"The broker has {MAX_NONCES:,} open nonces: ask again later.", status=429)
            nonce = secrets.token_hex(32)
            self._record(
                "nonce", {"nonce_sha256": sha256(nonce.encode()), "expires": now + self.policy["nonce.seconds"]}
            )
            return nonce

    def decide(self, signed: bytes) -> str:
        """The release for a session's evidence, a token.

        Whatever is decided, the nonce in the evidence is used up.

        Raises:
            BrokerRefusal: a rule failed; nothing is released. UserError: nothing can be recorded or dated.
        """
        problem: str | None = None
        try:
            evidence = read_evidence(signed)
        except Exception as error:  # of any kind: these bytes come from anywhere
            problem = error.problem if isinstance(error, UserError) else type(error).__name__
        with self._turn:
            if self._data_key is None:
                raise UserError("This broker has no data key: start it with --key.")
            now = self._clock.now()
            if problem is not None:
                facts = {"request": "release", "evidence_sha256": sha256(signed)}
                self._refuse(facts, [Failure("evidence", "a signed attestation", problem)], 400)
            return self._release(evidence, self._data_key, now)

    def progress(self, signed: bytes) -> None:
        """Record how far a job's evidence log has come, from a report signed by its newest session.

        Raises:
            BrokerRefusal: it is not its newest session's, or goes back. UserError: nothing can be recorded or dated.
        """
        with self._turn:
            self._clock.now()
            try:
                report = self._read_report(signed)
            except (UserError, ValueError) as error:
                problem = error.problem if isinstance(error, UserError) else str(error)
                self._refuse(
                    {"request": "progress"}, [Failure("report", "one by the job's newest session", problem)], 400
                )
            newest = self._state.jobs[report.job].newest
            if (report.sequence, report.head) == newest:
                return  # asked twice
            if newest and report.sequence <= newest[0]:
                failure = Failure("sequence", f"more than {newest[0]}", str(report.sequence))
                self._refuse({"request": "progress", **asdict(report)}, [failure], 409)
            self._record("progress", asdict(report))

    def _read_report(self, signed: bytes) -> LogProgress:
        """A report, if the newest session of its job signed it. Raises UserError or ValueError."""
        name = self._state.sessions.get(str(dsse.peek(signed)["predicate"].get("session")))
        if name is None:
            raise ValueError("the key was not released to its session")
        job = self._state.jobs[name]
        statement = dsse.verify(signed, PublicKey.parse(job.key))
        if statement["predicateType"] != PROGRESS:
            raise ValueError("it is another kind of statement")
        report: LogProgress = typed(LogProgress, statement["predicate"], "the report", unknown="refuse")
        if (report.job, report.session) != (name, job.session):
            raise ValueError("it is not of the job's newest session")
        return report

    def _release(self, evidence: Evidence, data_key: DataKey, now: float) -> str:
        self._state.forget(now)
        name, nonce = str(claim_or_none(evidence.claims, "job.name")), evidence.claims.get("eat_nonce")
        job = self._state.jobs.get(name)
        facts = {
            "request": "release",
            "job": escape_unprintable(name)[:MAX_NAME],
            "evidence_sha256": evidence.sha256,
            "session": evidence.signing.keyid,
        }
        failures, token = [], ""
        if isinstance(nonce, str) and SHA256.fullmatch(nonce):
            facts["nonce_sha256"] = sha256(nonce.encode())
        if facts.get("nonce_sha256") not in self._state.nonces:
            failures.append(Failure(NONCE, "a nonce of this broker, not used and not expired", "another"))
            nonce = None
        try:
            result = appraise(evidence, self.policy, nonce=nonce, now=now, head=job.newest if job else None)
            failures += [*result.failures, *self._session_failures(evidence, job is None)]
            if not failures:
                lines = job.lines if job else []
                token = make_release(evidence, result, self.policy, data_key, self._signing, now, lines)
        except Exception as error:  # the nonce is used all the same
            self._refuse(facts, [Failure("appraisal", "a result", f"an error ({type(error).__name__})")], 500)
        if not token:
            self._refuse(facts, failures, 403)
        released = {
            **facts,
            "session_key": evidence.signing.pem,
            "resume": evidence.claims.get("resume"),
            "release_sha256": sha256(token.encode()),
            "expires": now + self.policy["release.seconds"],
            "recipient": data_key.recipient,
            "level": evidence.claims["level"],
        }
        self._record("released", released, [("evidence", evidence.sha256)])  # it must not be given away before
        self._tell(f"Released the key to the job '{facts['job']}', session {evidence.signing.keyid[:16]}.")
        return token

    def _session_failures(self, evidence: Evidence, unknown: bool) -> Iterable[Failure]:
        """The rules that need the broker's memory or its keys."""
        name, resume = claim_or_none(evidence.claims, "job.name"), evidence.claims.get("resume")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            yield Failure("job.name", f"1 to {MAX_NAME} printable characters", value_text(name))
        if resume is not None:
            try:
                typed(LogPosition, resume, unknown="refuse")
                if unknown:
                    yield Failure(HEAD, "the first session of a job that this broker does not know", "one that resumes")
            except ValueError:
                yield Failure(HEAD, "number and SHA-256 of a line", value_text(resume))
        if evidence.signing.keyid in self._state.sessions:
            yield Failure(KEYS, "new ephemeral keys", "those of an earlier session")
        if (released := len(self._state.sessions)) >= (maximum := self.policy["release.sessions"]):
            yield Failure("release.sessions", f"at most {maximum:g} releases", f"{released:,} before")
        if self.recipient not in (claim_or_none(evidence.claims, "job.recipients") or ()):
            yield Failure("release.recipients", f"{self.recipient}, the data key's, among the job's", "it is not")

    def _refuse(self, facts: Mapping[str, Any], failures: list[Failure], status: int) -> NoReturn:
        """Record a refusal, then raise it."""
        subject = "the key" if facts["request"] == "release" else "the report"
        rules = list(dict.fromkeys(failure.rule for failure in failures))
        cure = (
            "resume the job's newest run, or give a new run another job name"
            if HEAD in rules
            else "mend that and ask again"
        )
        sentence = f"The broker refused {subject}, since {join_words(rules)} failed: {cure}."
        refusal = BrokerRefusal(sentence, failures, status)
        self._record("refused", {**facts, "failures": refusal.failures})
        self._tell(f"Refused {subject}: {'; '.join(refusal.lines[1:])}")
        raise refusal

    def _record(self, stage: str, facts: Mapping[str, Any], subjects: Iterable[tuple[str, str]] = ()) -> None:
        policy = self.policy.as_dict()
        self._log.append(stage, {**facts, "policy": policy}, [("policy.toml", self.policy.sha256), *subjects])


def open_broker(
    policy: Path,
    signing: SigningKey,
    data_key: DataKey | None = None,
    state: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Broker:
    """The broker of a policy file, which also serves machines that cannot reach it, by files.

    Args:
        state: directory of its log; by default POLICY.broker beside the policy. The others as for `Broker`.

    Raises:
        UserError: the policy cannot be read, or `Broker` cannot be made.
    """
    directory = state or policy.with_name(f"{policy.name.removesuffix('.toml')}.broker")
    return Broker(directory, Policy.read(policy), signing, data_key, tell)
