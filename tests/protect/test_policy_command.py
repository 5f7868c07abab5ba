"""`protect policy`: a policy from a job or from evidence, which verifies the same job's evidence."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import MODELS
from support.policies import GIVEN

from wgpu_lora.cli import main
from wgpu_lora.protect.attestation import measurements
from wgpu_lora.protect.attestation.claims import attest, read_evidence
from wgpu_lora.protect.hygiene.memory_protection import HostProtection
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.runs import protected_job as jobs
from wgpu_lora.protect.runs import protected_session
from wgpu_lora.protect.runs.protected_session import job_claims
from wgpu_lora.protect.sealed.keys import DataKey, SessionKeys, SigningKey
from wgpu_lora.protect.sealed.sealed_files import seal_path

MEASURED = ("package", "wgpu", "python", "dependencies", "process", "kernel", "environment")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(protected_session, "harden", lambda: HostProtection(GIVEN.claims["host"]))
    monkeypatch.setattr(measurements, "measurements", lambda: {name: GIVEN.claims[name] for name in MEASURED})

    def ran(*arguments: Any) -> tuple[int, str, str]:
        code = main(["protect", *map(str, arguments)])
        return (code, *capsys.readouterr())

    return ran


@pytest.fixture
def job(tmp_path: Path) -> Path:
    owner = DataKey.generate()
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": "x"}) + "\n" for i in range(12)))
    seal_path(rows, tmp_path / "train.jsonl.age", [owner.recipient])
    (tmp_path / "broker.pub").write_text(SigningKey.generate().public.pem)
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
        [protected]
        data = "train.jsonl.age"
        output = "run"
        recipients = ["{owner.recipient}"]
        files = "exchange"
        broker_key = "broker.pub"
        [training]
        model = "{MODELS / "qwen2"}"
        max_steps = 5
        """
    )
    return path


def evidence_of(job: Path, nonce: str = "nonce-of-this-test") -> bytes:
    keys = SessionKeys.generate()
    claims = job_claims(jobs.read_job(job), nonce=nonce, keys=keys)
    return attest({**claims, "host": GIVEN.claims["host"]}, keys, quote=False)


@pytest.mark.parametrize("strict", [(), ("--strict",)])
def test_a_policy_of_a_job_verifies_its_evidence(tmp_path: Path, job: Path, run: Run, strict: tuple[str, ...]) -> None:
    code, text, error = run("policy", job, *strict)
    assert (code, error) == (0, "")
    policy = tmp_path / "policy.toml"
    policy.write_text(text)
    rules = Policy.read(policy)
    assert (rules.min_rows, rules.max_steps) == (12, 5)
    assert rules.recipients == jobs.read_job(job).recipients
    evidence = tmp_path / "evidence.json"
    evidence.write_bytes(evidence_of(job))
    code, out, _ = run("verify", evidence, "--policy", policy, "--nonce", "nonce-of-this-test")
    assert code == 0, out
    job.write_text(job.read_text().replace("max_steps = 5", "max_steps = 6"))
    evidence.write_bytes(evidence_of(job))
    code, out, _ = run("verify", evidence, "--policy", policy)
    failed = {line.split()[1].rstrip(":") for line in out.splitlines() if line.startswith("failed")}
    assert failed == {"training.max_steps"} | ({"job.sha256", "recipe.sha256"} if strict else set())
    # From evidence, the same policy as from the job on the machine that made it.
    assert run("policy", evidence, *strict)[1] == run("policy", job, *strict)[1]


def test_bad_input(tmp_path: Path, job: Path, run: Run) -> None:
    keys = SessionKeys.generate()
    claims = {name: value for name, value in read_evidence(evidence_of(job)).claims.items() if name != "job"}
    claims |= {"keys": {"recipient": keys.data.recipient, "signing": keys.signing.public.pem}, "iat": int(time.time())}
    jobless, damaged, changed = (tmp_path / f"{name}.json" for name in ("jobless", "damaged", "changed"))
    jobless.write_bytes(attest(claims, keys, quote=False))
    damaged.write_bytes(b"{}")
    changed.write_bytes(evidence_of(job).replace(b'"sig":"', b'"sig":"A'))
    data = tmp_path / "train.jsonl.age"
    sources: list[tuple[Any, ...]] = [(path,) for path in (tmp_path / "none.toml", tmp_path, damaged, jobless, changed)]
    for arguments in [*sources, (jobless, "--device", "0"), (job, "--device", "no such device")]:
        code, out, error = run("policy", *arguments)
        assert (code, out, error.count("\n")) == (2, "", 1), arguments
    data.write_bytes(data.read_bytes()[:-1])  # not the file that its record is about
    assert run("policy", job)[0] == 2
