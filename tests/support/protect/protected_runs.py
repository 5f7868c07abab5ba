"""Protected runs' directories as training leaves them, without the training, any part changed before it is signed."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jwt

from support.protect.policies import GIVEN, LEAST, OWNER, digest
from wgpu_lora.protect.attestation.claims import LEVELS, PROFILE, attest, read_evidence
from wgpu_lora.protect.broker.release_token import TYPE, make_release
from wgpu_lora.protect.check import CheckResult, check
from wgpu_lora.protect.evidence.model_signature import NAME as MODEL_SIG
from wgpu_lora.protect.evidence.model_signature import sign_model
from wgpu_lora.protect.evidence.run_evidence import EvidenceLog
from wgpu_lora.protect.evidence.run_statement import RunFacts, write_statement
from wgpu_lora.protect.policies.appraisal import appraise
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import DataKey, PublicKey, SessionKeys, SigningKey

ADAPTER = {"adapter_model.safetensors": b"weights", "adapter_config.json": b"{}"}
JOB = b"[protected]\n"
LIMITS = "\n[training]\nmin_rows = 8\nmax_steps = 100\n"
Change = Callable[[Any], Any]


@dataclass
class DataOwner:
    """Keys of a data owner, and the policy of its broker."""

    data: DataKey = field(default_factory=DataKey.generate)
    signing: SigningKey = field(default_factory=SigningKey.generate)
    limits: str = LIMITS

    @property
    def public(self) -> PublicKey:
        return self.signing.public

    @property
    def policy(self) -> Policy:
        return Policy.parse(self.policy_text())

    def policy_text(self) -> bytes:
        return (LEAST.replace(OWNER, self.data.recipient) + self.limits).encode()


@dataclass
class Made:
    """A run that was made: its directory, the opened adapter, and its sessions' keys."""

    directory: Path
    adapter: Path
    keys: list[SessionKeys]


def make_run(
    directory: Path,
    owner: DataOwner,
    changes: Mapping[str, Change] | None = None,
    run: str = "run-1",
    job: str = "ward-7",
    sessions: int = 2,
    end: str = "finished",
) -> Made:
    """A run of sessions that are interrupted, but the last one.

    Args:
        changes: functions of what is about to be signed: `claims-N`, `release-N` (the token's claims), `STAGE-N` (facts
            and subjects of a line; None leaves it out), `cleanup-N`, `facts` (of the statement).
        end: stage of the last session's end; "" is a killed one.
    """
    directory.mkdir()
    (directory / "job.toml").write_bytes(JOB)
    result = Made(directory, directory.with_name(f"{directory.name}-adapter"), [])
    for number in range(1, sessions + 1):
        _session(result, owner, number, dict(changes or {}), run, job, end if number == sessions else "interrupted")
    return result


def checked_run(owner: DataOwner, result: Made, policy: Policy | None = None) -> CheckResult:
    """What `protect check` finds with the owner's key, its policy and the opened adapter."""
    adapter = result.adapter if result.adapter.exists() else None
    return check(result.directory, owner.public, policy or owner.policy, adapter)


def _session(
    result: Made, owner: DataOwner, number: int, changes: dict[str, Change], run: str, job: str, end: str
) -> None:
    keys, directory = SessionKeys.generate(), result.directory
    result.keys.append(keys)
    log = EvidenceLog.start(directory, keys, run) if number == 1 else EvidenceLog.resume(directory, keys)

    def changed(name: str, value: Any) -> Any:
        return changes[f"{name}-{number}"](value) if f"{name}-{number}" in changes else value

    def line(stage: str, facts: dict[str, Any], subjects: list[tuple[str, str]] | None = None) -> None:
        value = changed(stage, (facts, subjects or []))
        if value is not None:
            log.append(stage, *value)

    def sealed(name: str, content: bytes) -> tuple[str, str]:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
        return name, hashlib.sha256(content).hexdigest()

    claims = changed("claims", _claims(owner, keys, number, job, log))
    evidence = changed("evidence", attest(claims, keys, quote=False))
    log.attested(evidence)
    log.released(changed("token", _token(owner, evidence, number, changed)))
    data = claims["job"]["data"]
    line("opened", {"rows": 800, "trained_rows": 800}, [(item["name"], item["sha256"]) for item in data])
    if number == 1:
        line("started", {"max_steps": 100})
    else:
        line("resumed", {"step": 4 * number - 4}, [log_subject(log, "checkpoint")])
    for step in (4 * number - 2, 4 * number):
        name = f"checkpoints/step-{step}.tar.age"
        line("checkpoint", {"step": step, "loss": 1 / step}, [sealed(name, b"sealed %d" % step)])
        line("evaluated", {"step": step, "loss": 2 / step})
    if not end:
        return
    facts = RunFacts(
        steps=4 * number, elapsed_seconds=3.5, stop_reason="target", target_seconds=3.5, budget_steps=4 * number,
        initial_loss=4.0, final_loss=0.5, best_loss=0.5, rows=800, tokens=4096,
        weights_sha256="d" * 64,
    )  # fmt: skip
    adapter = sealed("adapter.tar.age", b"sealed adapter") if end == "finished" else None
    line(end, asdict(facts) if adapter else {"reason": "test"}, [adapter] if adapter else [])
    record = {"complete": True, "wiped": [{"what": "device buffers", "bytes": 64}], "not_wiped": ["immutable bytes"]}
    if (record := changed("cleanup", record)) is not None:
        log.wiped(record)
    if adapter and record is not None:
        files = {**ADAPTER, MODEL_SIG: sign_model(ADAPTER, keys.signing)}
        result.adapter.mkdir()
        for name, content in files.items():
            (result.adapter / name).write_bytes(content)
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        if (stated := changed("statement", (claims, digests, adapter, facts))) is not None:
            write_statement(log, *stated)


def log_subject(log: EvidenceLog, stage: str) -> tuple[str, str]:
    """The first subject of the last line of a stage."""
    return next(entry.subjects[0] for entry in reversed(log.entries) if entry.stage == stage)


def _claims(owner: DataOwner, keys: SessionKeys, number: int, job: str, log: EvidenceLog) -> dict[str, Any]:
    claims = copy.deepcopy(GIVEN.claims)
    claims["job"] |= {"name": job, "recipients": [owner.data.recipient], "sha256": hashlib.sha256(JOB).hexdigest()}
    claims |= {
        "eat_profile": PROFILE,
        "eat_nonce": digest(f"{log.name} {number}"),
        "iat": int(time.time()),
        "level": "self-reported",
        "level_note": LEVELS["self-reported"],
        "keys": {"recipient": keys.data.recipient, "signing": keys.signing.public.pem},
    }
    del claims["resume"]
    return claims if number == 1 else {**claims, "resume": {"sequence": log.sequence, "head": log.head}}


def _token(owner: DataOwner, data: bytes, number: int, changed: Callable[[str, Any], Any]) -> str:
    evidence, policy = read_evidence(data), owner.policy
    appraisal = appraise(evidence, policy, nonce=None, now=evidence.claims["iat"])
    appraisal = replace(appraisal, failures=[])  # a broker may have been deceived
    token = make_release(evidence, appraisal, policy, owner.data, owner.signing, time.time())
    claims = changed("release", jwt.decode(token, options={"verify_signature": False}))
    return jwt.encode(claims, owner.signing.key, "ES256", headers={"kid": owner.public.keyid, "typ": TYPE})
