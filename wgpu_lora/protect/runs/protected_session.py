"""A session's beginning: attestation with ephemeral keys, and the release that the broker answers with.

In the order of RATS' background-check model (RFC 9334, 5.2): nonce, evidence, appraisal by the broker, key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import sha256, write_bytes_atomic
from wgpu_lora.files.installation import program
from wgpu_lora.files.json_files import read_bytes
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.spelling import flag
from wgpu_lora.protect.attestation.claims import attest, base_facts, gather, load_evidence, read_evidence
from wgpu_lora.protect.broker.broker import Clock, sign_progress
from wgpu_lora.protect.broker.broker_client import BrokerClient, RefusalError
from wgpu_lora.protect.broker.release_token import MAX_TOKEN, Release, check_expired, missing_line, open_release
from wgpu_lora.protect.evidence import anchors
from wgpu_lora.protect.evidence.run_evidence import CLEANUP, EvidenceLog, read_log
from wgpu_lora.protect.evidence.run_evidence import NAME as LOG
from wgpu_lora.protect.evidence.run_statement import NAME as STATEMENT
from wgpu_lora.protect.memory_protection import HostProtection
from wgpu_lora.protect.runs.protected_job import ProtectedJob
from wgpu_lora.protect.runs.sealed_storage import ADAPTER
from wgpu_lora.protect.sealed.keys import SessionKeys
from wgpu_lora.protect.session_checks import Findings, check_sessions, sessions_of

JOB_COPY = "job.toml"
EVIDENCE, RELEASE = "evidence.json", "release.jwt"  # in a job's directory of files
POLL = 0.5  # seconds between two looks for a release
Say = Callable[[str, str], None]  # a label and a text, for the user


@dataclass
class Session:
    """A session of a job, which gets the data key from the broker by `attest`.

    Attributes:
        log: of the run that it goes on with; one without lines for a new run, until it is attested.
        claims: of its evidence. release: None until the broker has answered.
        protection_times: (begin, seconds) of what protecting the training took while it ran, by `time.perf_counter`.
    """

    job: ProtectedJob
    keys: SessionKeys
    host: HostProtection
    log: EvidenceLog
    say: Say
    claims: dict[str, Any] = field(default_factory=dict)
    release: Release | None = None
    protection_times: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        job, self._clock = self.job, Clock()
        self._client = BrokerClient(job.broker, job.broker_key, job.ca) if job.broker else None

    @property
    def data(self) -> dict[str, dict[str, Any]]:
        """What was attested of each sealed file and each model beside the base, by role."""
        return {item["role"]: item for item in self.claims["job"]["data"]}

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts what is done within as protection."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.protection_times.append((begin, time.perf_counter() - begin))

    def check_expired(self) -> None:
        """Raise UserError if the release has expired."""
        assert self.release
        check_expired(self.release.claims, self._clock.latest())

    def report(self, ended: bool = False) -> None:
        """Tell the broker how far the log has come, as far as it can be reached.

        Raises:
            RefusalError: another session goes on with the job, unless this one has ended anyway.
        """
        if self._client is None:
            return
        try:
            self._client.report(sign_progress(self.job.name, self.log.sequence, self.log.head, self.keys.signing))
        except UserError as error:
            if isinstance(error, RefusalError) and not ended:
                raise
            self.say("note", f"the broker was not told how far this run is: {error.problem}")

    def attest(self, model: LoadedModel, nonce: str | None) -> Release:
        """Attest to the broker, and open its release.

        Raises:
            UserError: the broker cannot be reached, refuses, or answers with what is not a release for this session.
        """
        job, client = self.job, self._client
        if nonce is None:
            if client is None:
                raise UserError(
                    f"Releases by files need {flag('nonce')}: the data owner prints one with wgpu-lora protect nonce."
                )
            nonce = client.nonce()
        resume = (self.log.sequence, self.log.head) if self.log.entries else None
        base = base_facts(model.name, model.checkpoint, model.config)
        claims = gather(
            model.device.info, nonce=nonce, keys=self.keys, job=job, base=base, resume=resume, host=self.host.facts
        )
        if resume:
            findings = Findings()
            before = load_evidence(job.output / "evidence-1.json").claims["job"]  # verified when the log was opened
            if not findings.expect("the job", claims["job"], before):
                raise UserError(
                    f"The job has changed since the run in {job.output} started: restore it, or start a new run in "
                    "another directory.",
                    findings.failures,
                )
        evidence = attest(claims, self.keys)
        self.claims = read_evidence(evidence).claims
        self.say("attested", f"with {self.claims['level']} claims")
        token = client.release(evidence) if client else ""  # nothing is on the disk if it is refused
        if not resume:
            write_bytes_atomic(job.output / JOB_COPY, job.content)
            self.log = EvidenceLog.start(job.output, self.keys, f"{job.name}-{sha256(evidence)[:16]}")
        self.log.attested(evidence)
        token = token or self._release_by_files(evidence)
        now = self._clock.latest()
        release = open_release(token, job.broker_key, sha256(evidence), nonce, self.keys, now, job.recipients)
        try:
            missing = missing_line(release.claims, [entry.digest for entry in self.log.entries[:-1]])
            if missing is not None:
                raise UserError(
                    f"{self.log.path} does not have the line {missing + 1} that the broker was told of, so that its "
                    "directory is an older state or another run: restore the newest one."
                )
            self.log.released(token, release.facts())
        except BaseException:
            release.key.wipe()  # no cleanup knows of it yet
            raise
        self.release = release  # whose end is reported to the broker: the log is one that it may believe
        self.say("released", f"the data's key, by the broker {job.broker_key.keyid[:16]}, for the job {job.name}")
        return release

    def _release_by_files(self, evidence: bytes) -> str:
        """Write the evidence, and wait for the release."""
        files = self.job.files
        assert files is not None
        answer = files / RELEASE
        try:
            files.mkdir(parents=True, exist_ok=True)
            answer.unlink(missing_ok=True)  # of an earlier session
            write_bytes_atomic(files / EVIDENCE, evidence)
        except OSError as error:
            raise UserError(f"{files} cannot be written ({error.strerror}): choose another directory.") from None
        self.say("waiting", f"for {answer}, in answer to {files / EVIDENCE}; the keys are in memory only")
        before = None
        while True:  # until it is there, and whole: copying it may take a while
            content = read_bytes(answer, MAX_TOKEN) if answer.is_file() else None
            if content and content == before:
                return content.decode("ascii", "replace").strip()
            before = content
            time.sleep(POLL)


def open_log(job: ProtectedJob, keys: SessionKeys, resume: bool) -> EvidenceLog:
    """The log of the run in a job's directory, verified; one without lines if there is no run.

    Raises:
        UserError: there is a run and it is not to be resumed, or none to resume; or the log is damaged or older than
            the one that this machine wrote.
    """
    path = job.output / LOG
    entries = read_log(path) if path.is_file() else []
    if entries:
        anchors.check(entries[0].chain, [entry.digest for entry in entries])
    if not any(entry.stage == "released" for entry in entries):
        if path.is_file():  # its sessions never had the key, and the broker may not know them
            path.unlink()
            (job.output / CLEANUP).unlink(missing_ok=True)
        elif resume:
            raise UserError(f"There is no protected run in {job.output} to resume: start without {flag('resume')}.")
        else:
            _check_unused(job)
        return EvidenceLog(job.output, keys)
    if not resume:
        raise UserError(
            f"The output directory {job.output} already holds a protected run: choose another in {job.path}, or "
            f"continue it with {program()} finetune --protected {job.path} --resume."
        )
    log, findings = EvidenceLog.resume(job.output, keys), Findings()
    check_sessions(job.output, sessions_of(log.entries), job.broker_key, None, findings)
    if findings.failures:  # anybody can write a log
        raise UserError(
            f"The run in {job.output} cannot be resumed, since its evidence is not what the job's broker answered: "
            "restore its files, or start a new run in another directory.",
            findings.failures,
        )
    return log


def _check_unused(job: ProtectedJob) -> None:
    """Raise UserError if a new run would write over other files, which may be the job's own."""
    file_names = (ADAPTER, CLEANUP, STATEMENT, "evidence-1.json", "release-1.jwt")
    conflicts = [job.output / name for name in file_names if (job.output / name).exists()]
    copy = job.output / JOB_COPY
    if copy.exists() and read_bytes(copy, len(job.content)) != job.content:
        conflicts.append(copy)
    if conflicts:
        raise UserError(
            f"{conflicts[0]} exists already, and the run would write over it: choose another output in {job.path}, or "
            "move that file."
        )
