"""`protect attest`, `policy` and `verify`: what they write and print, and what they refuse."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.protect.attesting import NONCE as SHORT_NONCE
from support.protect.attesting import quick
from support.protect.policies import GIVEN, LEAST, NONCE, digest
from support.protect.protected import Hospital
from support.protect.protected_runs import DataOwner, make_run
from support.protect.tpm import MISSING, software_tpm

from wgpu_lora.cli.app import main
from wgpu_lora.protect.attestation import measurements, tpm
from wgpu_lora.protect.attestation.claims import LEVELS, PROFILE, attest, load_evidence
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.evidence.run_statement import RUN
from wgpu_lora.protect.memory_protection import HostProtection
from wgpu_lora.protect.policies.appraisal import verify
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.runs import protected_run
from wgpu_lora.protect.runs.protected_run import machine_claims
from wgpu_lora.protect.sealed.keys import SessionKeys, SigningKey

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "anchors"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def ran(*arguments: Any) -> tuple[int, str, str]:
        command = [] if arguments[0] in ("attest", "policy", "verify") else ["verify"]
        code = main(["protect", *command, *map(str, arguments)])
        return (code, *capsys.readouterr())

    return ran


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(LEAST + "[device]\nnames = ['NVIDIA*']\n[kernel]\nsystems = ['Linux']\n")
    return path


def write_evidence(path: Path, **changed: Any) -> Path:
    keys = SessionKeys.generate()
    claims = copy.deepcopy(GIVEN.claims) | {
        "eat_profile": PROFILE,
        "iat": int(time.time()),
        "level": "self-reported",
        "level_note": LEVELS["self-reported"],
        "keys": {"recipient": keys.data.recipient, "signing": keys.signing.public.pem},
    }
    path.write_bytes(attest(claims | changed, keys, quote=False))
    return path


def test_evidence_that_passes(tmp_path: Path, policy: Path, run: Run) -> None:
    evidence = write_evidence(tmp_path / "evidence.json")
    code, out, _ = run(evidence, "--policy", policy, "--nonce", NONCE)
    assert code == 0, out
    assert "result    passed: 9 rules" in out
    assert "session of the job 'ward-7'" in out
    assert "self-reported" in out
    assert "unchecked" in out
    assert "evidence.nonce" not in out
    code, out, _ = run(evidence, "--policy", policy)
    assert code == 0
    assert "evidence.nonce" in next(line for line in out.splitlines() if line.startswith("unchecked"))


def test_every_failed_rule_has_a_line(tmp_path: Path, policy: Path, run: Run) -> None:
    evidence = write_evidence(tmp_path / "evidence.json", device={"name": "llvmpipe"}, kernel={"system": "Darwin"})
    code, out, _ = run(evidence, "--policy", policy, "--nonce", "another-nonce")
    assert code == 1
    failed = [line.split()[1] for line in out.splitlines() if line.startswith("failed")]
    assert failed == ["evidence.nonce:", "device.names:", "kernel.systems:"]
    assert "refused: 3 of 9 rules failed" in out
    assert "expected 'NVIDIA*', found 'llvmpipe'" in out
    code, out, _ = run(evidence, "--policy", policy, "--json")
    assert code == 1
    appraisal = json.loads(out)["submods"]["wgpu-lora"]
    assert appraisal["ear.status"] == "contraindicated"
    assert [failure["rule"] for failure in appraisal["ear.wgpu-lora.failures"]] == ["device.names", "kernel.systems"]


def test_freshness(tmp_path: Path, policy: Path, run: Run) -> None:
    evidence = write_evidence(tmp_path / "evidence.json", iat=1_800_000_000)  # 2027-01-15T08:00:00Z
    assert run(evidence, "--policy", policy)[0] == 1
    assert run(evidence, "--policy", policy, "--at", "2027-01-15T08:04:00Z")[0] == 0
    assert run(evidence, "--policy", policy, "--at", "2027-01-15T09:04:00+01:00")[0] == 0
    assert "nonce.seconds" in run(evidence, "--policy", policy, "--at", "2027-01-15T08:06")[1]
    assert "failed    nonce.skew" in run(evidence, "--policy", policy, "--at", "2027-01-15T07:00")[1]
    for wrong in ("soon", "2027-13-01", "9999-12-31T23:59:59-99:00"):
        code, _, error = run(evidence, "--policy", policy, "--at", wrong)
        assert (code, error.count("\n")) == (2, 1)


def test_bad_input(tmp_path: Path, policy: Path, run: Run) -> None:
    evidence = write_evidence(tmp_path / "evidence.json")
    data, other = evidence.read_bytes(), tmp_path / "other.json"
    statement = dsse.statement("other", [("a", digest(1))], {"a": 1})
    cases = [(path, policy) for path in (tmp_path / "none.json", tmp_path)]
    cases += [(evidence, tmp_path / "none.toml"), (evidence, evidence)]
    for damaged in (
        b"", b"{}", data[:-9], data.replace(b'"sig":"', b'"sig":"A', 1), b"\xff" * 100, b"[" * 100_000,
        data + b" " * (10 << 20), dsse.sign(statement, SigningKey.generate()),
    ):  # fmt: skip
        other.write_bytes(damaged)
        code, out, error = run(other, "--policy", policy)
        assert (code, out, error.count("\n")) == (2, "", 1), error
    for path, rules in cases:
        code, out, error = run(path, "--policy", rules)
        assert (code, out, error.count("\n")) == (2, "", 1), error


def test_a_finished_run(tmp_path: Path, run: Run) -> None:
    owner = DataOwner()
    directory = make_run(tmp_path / "run", owner, sessions=2).directory
    (tmp_path / "policy.toml").write_text(LEAST.replace("recipients = [", f"recipients = ['{owner.data.recipient}', "))

    def finished(more: str) -> tuple[int, str]:
        path = tmp_path / "limits.toml"
        path.write_text((tmp_path / "policy.toml").read_text() + more)
        code, out, error = run(directory / "statement.json", "--policy", path)
        assert not error
        return code, out

    code, out = finished("[training]\nmin_rows = 800\nmax_steps = 100")
    assert code == 0, out
    assert "statement of a finished run of the job 'ward-7'" in out
    code, out = finished("[training]\nmin_rows = 801\nmax_steps = 7")
    assert code == 1
    assert "training.max_steps: expected at most 7 steps done, found 8" in out
    assert "training.min_rows: expected at least 801 rows trained, found 800" in out
    assert "training.max_steps: expected at most 7 steps, found 100" in out  # of the evidence
    assert run(directory / "statement.json", "--policy", tmp_path / "policy.toml", "--nonce", NONCE)[0] == 2
    assert run(directory / "cleanup.json", "--policy", tmp_path / "policy.toml")[0] == 2


CHANGES: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "rows": (lambda s: (*s[:3], replace(s[3], rows=7)), {"training.min_rows"}),
    "rows unknown": (lambda s: (*s[:3], replace(s[3], rows=None)), {"training.min_rows"}),
    "steps": (lambda s: (*s[:3], replace(s[3], steps=101)), {"training.max_steps"}),
    "no steps": (lambda s: (*s[:3], replace(s[3], steps=0)), {"training.max_steps"}),
    "steps of another type": (lambda s: (*s[:3], replace(s[3], steps="8")), {"training.max_steps"}),
    "other base": (lambda s: ({**s[0], "base": {"sha256": digest("x")}}, *s[1:]), {"statement.materials"}),
    "other options": (
        lambda s: ({**s[0], "job": {**s[0]["job"], "options": {"max_steps": 9}}}, *s[1:]),
        {"statement.parameters"},
    ),
}


def test_a_statement_that_differs_from_its_evidence(tmp_path: Path) -> None:
    for name, (change, rules) in CHANGES.items():
        owner = DataOwner()

        def changed(stated: Any, change: Any = change, owner: DataOwner = owner) -> Any:
            claims, *extra = change(stated)
            job = {**claims["job"], "recipients": [owner.data.recipient]}
            return ({**claims, "job": job}, *extra)

        directory = make_run(tmp_path / name, owner, {"statement-1": changed}, run=name, sessions=1).directory
        result, appraised = verify(directory / "statement.json", owner.policy, None, time.time())
        assert {failure.rule for failure in result.failures} == rules, name
        assert appraised.startswith("statement of a finished run of the job ")


def test_a_statement_without_the_evidence_of_its_session(tmp_path: Path, run: Run, policy: Path) -> None:
    owner = DataOwner()
    first, other = (make_run(tmp_path / name, owner, run=name, sessions=1).directory for name in ("one", "other"))
    (first / "statement.json").write_bytes((other / "statement.json").read_bytes())
    code, out, error = run(first / "statement.json", "--policy", policy)
    assert (code, out) == (2, "")
    assert "not signed by a session" in error
    (first / "evidence-1.json").unlink()
    assert run(first / "statement.json", "--policy", policy)[0] == 2


def test_a_run_stated_twice_is_not_believed(tmp_path: Path) -> None:
    owner = DataOwner()
    protected_run = make_run(tmp_path / "run", owner, sessions=1)
    path = protected_run.directory / "statement.json"
    statement = dsse.verify(path.read_bytes(), protected_run.keys[0].signing.public)
    products = statement["predicate"]["runDetails"]["byproducts"]
    products.append(next(product for product in products if product["name"] == RUN))
    path.write_bytes(dsse.sign(statement, protected_run.keys[0].signing))
    result, _ = verify(path, owner.policy, None, time.time())
    assert {failure.rule for failure in result.failures} == {
        "statement.materials",
        "training.min_rows",
        "training.max_steps",
    }


# -- attest and policy -------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is measured is made up, and there is no TPM."""
    quick(monkeypatch)
    monkeypatch.delenv(tpm.TCTI, raising=False)
    monkeypatch.setattr(tpm, "DEVICE", tmp_path / "tpmrm0")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("machine")
def test_a_machine_and_a_job_are_attested(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("attest", "--nonce", SHORT_NONCE)
    evidence, out = load_evidence(tmp_path / "evidence.json"), " ".join(out.split())
    assert code == 0
    assert "job" not in evidence.claims
    for text in (
        evidence.claims["device"]["name"], evidence.sha256, evidence.recipient, "no quote There is no TPM",
        "level self-reported. Measured and stated by the program",
    ):  # fmt: skip
        assert text in out
    hospital = Hospital(tmp_path / "ward")
    job = hospital.job("small", max_steps=7)
    code, out, _ = run("attest", "--nonce", SHORT_NONCE, "--job", job, "-o", "of the job.json", "--no-quote")
    assert code == 0
    stated = load_evidence(tmp_path / "of the job.json").claims
    assert (stated["job"]["name"], stated["job"]["options"]["max_steps"]) == ("small", 7)
    assert stated["job"]["recipients"] == [hospital.owner.data.recipient]
    assert [(entry["role"], entry["rows"]) for entry in stated["job"]["data"]] == [("data", 12)]
    assert set(stated["base"]) == {"name", "sha256", "hashed", "config_sha256"}
    assert stated["host"]["core_dumps"]
    assert "train.jsonl.age, 12 rows" in " ".join(out.split())
    assert "no_quote" not in stated
    (tmp_path / "of the job.json").unlink()
    (tmp_path / "evidence.json").unlink()
    for arguments, words in (
        (["--nonce", "short"], "unusable"),
        (["--nonce", SHORT_NONCE, "--quote"], "no TPM"),
        (["--nonce", SHORT_NONCE, "--device", "no such device"], "No device is named"),
        (["--nonce", SHORT_NONCE, "--job", "missing.toml"], "missing.toml"),
        (["--nonce", SHORT_NONCE, "-o", "missing/evidence.json"], "The directory missing of --output does not exist"),
    ):
        code, _, error = run("attest", *arguments)
        assert (code, words in error, "Traceback" in error) == (2, True, False), error
        assert list(tmp_path.glob("*.json")) == []


@pytest.mark.usefixtures("machine")
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_a_tpm_signs_if_there_is_one(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tpm").mkdir()
    with software_tpm(tmp_path / "tpm") as connection:
        monkeypatch.setenv(tpm.TCTI, connection)
        code, out, _ = run("attest", "--nonce", SHORT_NONCE)
    assert code == 0
    assert load_evidence(tmp_path / "evidence.json").quote is not None
    assert "PCRs 0, 1, 2, 3, 4, 5, 6, 7" in " ".join(out.split())


@pytest.mark.parametrize("strict", [(), ("--strict",)])
def test_a_policy_of_a_job_verifies_its_evidence(
    tmp_path: Path, run: Run, strict: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("package", "wgpu", "python", "dependencies", "process", "kernel", "environment")
    monkeypatch.setattr(protected_run, "harden", lambda: HostProtection(GIVEN.claims["host"]))
    monkeypatch.setattr(measurements, "measurements", lambda: {name: GIVEN.claims[name] for name in names})
    job, policy, evidence = Hospital(tmp_path / "ward").job("job"), tmp_path / "policy.toml", tmp_path / "evidence.json"

    def attested(**without: Any) -> bytes:
        keys = SessionKeys.generate()
        claims = {**machine_claims(NONCE, keys, job), "host": GIVEN.claims["host"]}
        return attest({name: value for name, value in claims.items() if name not in without}, keys, quote=False)

    code, text, error = run("policy", job, *strict)
    assert (code, error) == (0, "")
    policy.write_text(text)
    rules = Policy.read(policy)
    assert (rules["training.min_rows"], rules["training.max_steps"]) == (12, 6)
    evidence.write_bytes(attested())
    assert run(evidence, "--policy", policy, "--nonce", NONCE)[0] == 0
    job.write_text(job.read_text().replace("max_steps = 6", "max_steps = 7"))
    evidence.write_bytes(attested())
    failed = {
        line.split()[1].rstrip(":")
        for line in run(evidence, "--policy", policy)[1].splitlines()
        if line.startswith("failed")
    }
    assert failed == {"training.max_steps"} | ({"job.sha256", "recipe.sha256"} if strict else set())
    # From evidence, the same policy as from the job on the machine that made it.
    assert run("policy", evidence, *strict)[1] == run("policy", job, *strict)[1]
    jobless = tmp_path / "jobless.json"
    jobless.write_bytes(attested(job=None))
    for arguments in (
        (tmp_path / "none.toml",),
        (jobless,),
        (evidence, "--device", "0"),
        (job, "--device", "no such device"),
    ):
        code, out, error = run("policy", *arguments)
        assert (code, out, error.count("\n")) == (2, "", 1), arguments
