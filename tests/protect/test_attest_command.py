"""`protect attest`: what it writes and prints, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.attesting import NONCE, quick
from support.tpm import MISSING, software_tpm

from wgpu_lora.cli import main
from wgpu_lora.protect.attestation import tpm
from wgpu_lora.protect.attestation.claims import load_evidence
from wgpu_lora.protect.sealed.keys import DataKey, SigningKey
from wgpu_lora.protect.sealed.sealed_files import seal_path

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    quick(monkeypatch)
    monkeypatch.delenv(tpm.TCTI, raising=False)
    monkeypatch.setattr(tpm, "DEVICE", tmp_path / "tpmrm0")
    monkeypatch.chdir(tmp_path)

    def ran(*arguments: Any) -> tuple[int, str, str]:
        code = main(["protect", "attest", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, " ".join(out.split()), err

    return ran


def write_job(directory: Path) -> tuple[Path, str]:
    """A job with sealed rows; its file and its recipient."""
    owner, broker = DataKey.generate(), SigningKey.generate()
    (directory / "rows.jsonl").write_text('{"text": "a secret"}\n' * 3)
    seal_path(directory / "rows.jsonl", directory / "rows.jsonl.age", [owner.recipient])
    (directory / "broker.pub").write_text(broker.public.pem)
    job = directory / "small.toml"
    job.write_text(
        f'[protected]\ndata = "rows.jsonl.age"\noutput = "run"\nrecipients = ["{owner.recipient}"]\n'
        'broker = "http://127.0.0.1:8713"\nbroker_key = "broker.pub"\n[training]\nmax_steps = 7\nseed = 3\n'
    )
    return job, owner.recipient


def test_a_machine_is_attested(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("--nonce", NONCE)
    assert code == 0
    found = load_evidence(tmp_path / "evidence.json")
    assert found.claims["eat_nonce"] == NONCE
    assert found.claims["device"]["name"] in out
    assert found.claims["host"]["core_dumps"]
    assert "job" not in found.claims
    assert found.sha256 in out
    assert "level self-reported. Measured and stated by the program" in out
    assert "no quote There is no TPM" in out
    assert found.recipient in out


def test_a_job_is_attested_with_it(run: Run, tmp_path: Path) -> None:
    job, recipient = write_job(tmp_path)
    code, out, _ = run("--nonce", NONCE, "--job", job, "-o", "of the job.json", "--no-quote")
    assert code == 0
    stated = load_evidence(tmp_path / "of the job.json").claims
    assert stated["job"]["name"] == "small"
    assert stated["job"]["recipients"] == [recipient]
    assert stated["job"]["options"]["max_steps"] == 7
    assert [(one["role"], one["rows"]) for one in stated["job"]["data"]] == [("data", 3)]
    assert set(stated["base"]) == {"name", "sha256", "hashed", "config_sha256"}
    assert "rows.jsonl.age, 3 rows" in out
    assert "secret" not in (tmp_path / "of the job.json").read_text()
    assert "no_quote" not in stated


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nonce", "short"], "unusable"),
        (["--nonce", NONCE, "--quote"], "no TPM"),
        (["--nonce", NONCE, "--device", "no such device"], "No device is named"),
        (["--nonce", NONCE, "--job", "missing.toml"], "missing.toml"),
        (["--nonce", NONCE, "-o", "missing/evidence.json"], "The directory missing of --output does not exist"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(run: Run, tmp_path: Path, arguments: list[str], words: str) -> None:
    code, _, error = run(*arguments)
    assert code == 2
    assert words in error
    assert error.count("\n") <= 3
    assert "Traceback" not in error
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_a_tpm_signs_if_there_is_one(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tpm").mkdir()
    with software_tpm(tmp_path / "tpm") as connection:
        monkeypatch.setenv(tpm.TCTI, connection)
        code, out, _ = run("--nonce", NONCE)
    assert code == 0
    assert load_evidence(tmp_path / "evidence.json").quote is not None
    assert "TPM PCRs 0, 1, 2, 3, 4, 5, 6, 7" in out
    assert "level quoted. A TPM signed" in out
