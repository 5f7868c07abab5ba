"""`protect check` against whoever can change a run's files, and whoever could even sign something else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.protect.policies import digest
from support.protect.protected_runs import DataOwner, Made, checked_run, make_run

from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.protect.attestation.claims import attest, read_evidence
from wgpu_lora.protect.check import CheckResult, check
from wgpu_lora.protect.evidence.run_evidence import NAME, EvidenceLog
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import SessionKeys, SigningKey

OWNER = DataOwner()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Made, Made, Made, Path]]:
    """A run, another one of the same job, one of another job, and the anchors of all."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WGPU_LORA_DATA_DIR", str(root / "data"))
        runs = make_run(root / "a", OWNER), make_run(root / "b", OWNER, run="run-2")
        yield *runs, make_run(root / "c", OWNER, run="run-3", job="ward-8"), root / "data"


@pytest.fixture
def run(originals: tuple[Made, Made, Made, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A copy of the run, on the machine that made it."""
    original = originals[0]
    for name in (original.directory, original.adapter):
        shutil.copytree(name, tmp_path / name.name)
    shutil.copytree(originals[3], tmp_path / "data")
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "data"))
    return Made(tmp_path / original.directory.name, tmp_path / original.adapter.name, original.keys)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run can be made, on another machine, quickly."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "fresh-data"))
    return tmp_path / "fresh"


def checked(target_run: Made, policy: Policy | None = None) -> CheckResult:
    return checked_run(OWNER, target_run, policy)


def test_a_run_is_verified_and_says_what_is_only_claimed(run: Made) -> None:
    result = checked(run)
    assert (result.failures, result.end, result.run) == ([], "finished", "run-1")
    assert "5 sealed files are those of the log" in result.proven
    assert "this is the newest state that this machine wrote" in result.proven
    assert "2 sessions' keys were attested to the broker, which released the data's key to them" in result.proven
    assert "the claims of every session about its software and device (self-reported)" in result.claimed
    assert result.line().startswith(f"proven, by the broker's key {OWNER.public.keyid[:12]}: ")
    alone = check(run.directory)
    assert alone.verified
    assert alone.proven == ["this is the newest state that this machine wrote"]
    assert "nothing but that the files fit each other" in alone.line()


def test_files_that_nothing_covers_are_named(run: Made) -> None:
    assert [text for text in checked(run).claimed if "does not cover" in text] == []
    other = run.directory / "checkpoints" / "notes.txt"
    other.write_text("mine")
    result = checked(run)
    other.unlink()
    assert result.verified
    assert "nothing about files that the evidence does not cover: checkpoints/notes.txt" in result.claimed


def test_every_flipped_file_is_found(run: Made) -> None:
    files = [path for path in sorted([*run.directory.rglob("*"), *run.adapter.rglob("*")]) if path.is_file()]
    assert len(files) == 16
    for path in files:
        content = path.read_bytes()
        for at in (len(content) // 3, len(content) - 1):
            path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            result = checked(run)
            assert result.failures, (path, at)
            assert result.proven == []
        path.write_bytes(content[:-1] if path.name == NAME else content[: len(content) // 2])
        assert checked(run).failures, path
        path.write_bytes(content)
    assert checked(run).verified


def test_every_removed_file_is_found_but_older_checkpoints_and_the_copy_of_the_job(run: Made) -> None:
    spared = ("job.toml", "step-2.tar.age", "step-4.tar.age", "step-6.tar.age")
    for path in [path for path in [*run.directory.rglob("*"), *run.adapter.rglob("*")] if path.is_file()]:
        content = path.read_bytes()
        path.unlink()
        if path.name == NAME:
            with pytest.raises(UserError, match=r"has no evidence.jsonl"):
                checked(run)
        else:
            assert checked(run).verified == (path.name in spared), path
        path.write_bytes(content)


def test_a_log_cut_off_at_any_line_is_found_even_without_an_anchor(run: Made, fresh: Path) -> None:
    path = run.directory / NAME
    lines = path.read_bytes().splitlines(True)
    endless = 0
    for count in range(len(lines)):
        path.write_bytes(b"".join(lines[:count]))
        result = checked(run)
        assert result.failures, count
        endless += any("has no end" in message for message in result.failures)
        for name in ("statement.json", "cleanup.json", "adapter.tar.age"):
            (run.directory / name).rename(run.directory.parent / name)
        result = checked(run)
        assert result.failures, count  # the whole end of the run is gone
        for name in ("statement.json", "cleanup.json", "adapter.tar.age"):
            (run.directory.parent / name).rename(run.directory / name)
    assert endless == len(lines) - 4  # but without a complete line, and from the end of a session on


def test_a_directory_put_back_as_a_whole_is_found_by_the_anchor(
    run: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "first"))
    old = make_run(tmp_path / "old", OWNER, run="run-9", sessions=1, end="interrupted")
    assert checked(old).verified
    assert checked(old).end == "interrupted"
    before = tmp_path / "before"
    shutil.copytree(old.directory, before)
    EvidenceLog.resume(old.directory, SessionKeys.generate()).attested(b"two")
    result = checked(replace(old, directory=before))
    assert any("had come to line" in message for message in result.failures)
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "second"))
    result = checked(replace(old, directory=before))
    assert result.verified
    assert any("no anchor on this machine" in message for message in result.claimed)


@pytest.mark.parametrize("other", [1, 2], ids=["another run", "another job"])
def test_files_of_another_run_are_found(run: Made, originals: tuple[Made, Made, Made, Path], other: int) -> None:
    theirs = originals[other]
    names = [path.relative_to(run.directory) for path in run.directory.rglob("*") if path.suffix in (".json", ".jsonl")]
    names += [Path(f"release-{number}.jwt") for number in (1, 2)]
    assert len(names) == 7
    for name in names:
        own_content = (run.directory / name).read_bytes()
        shutil.copy(theirs.directory / name, run.directory / name)
        assert checked(run).failures, name
        (run.directory / name).write_bytes(own_content)
    assert checked(replace(run, adapter=theirs.adapter)).failures
    for first, two in (
        ("checkpoints/step-6.tar.age", "checkpoints/step-8.tar.age"),
        ("evidence-1.json", "evidence-2.json"),
    ):
        contents = [(run.directory / name).read_bytes() for name in (first, two)]
        for name, content in zip((two, first), contents, strict=True):
            (run.directory / name).write_bytes(content)
        assert checked(run).failures, first
        for name, content in zip((first, two), contents, strict=True):
            (run.directory / name).write_bytes(content)
    assert checked(run).verified


def test_a_file_that_the_log_does_not_name_is_found(run: Made) -> None:
    (run.directory / "best.tar.age").write_bytes(b"sealed to somebody else")
    assert checked(run).failures == ["best.tar.age is not in the log"]
    (run.directory / "best.tar.age").unlink()
    (run.directory / "adapter.tar.age").rename(run.directory.parent / "elsewhere")
    (run.directory / "adapter.tar.age").symlink_to(run.directory.parent / "elsewhere")
    assert any("not a regular file of the run" in message for message in checked(run).failures)


def test_a_log_signed_anew_by_somebody_else_is_only_claimed(fresh: Path) -> None:
    attacker = DataOwner(data=OWNER.data)  # has a broker's key of its own
    forgery = make_run(fresh, attacker)
    result = checked(forgery)
    assert not result.verified
    assert sum("not signed by this broker's key" in message for message in result.failures) == 2
    alone = check(forgery.directory, adapter=forgery.adapter)
    assert alone.verified
    assert any("attested to a broker: no broker's key was given" in message for message in alone.claimed)


def test_another_policy_than_the_releases_is_not_accepted(run: Made) -> None:
    stricter = replace(OWNER, limits="\n[training]\nmin_rows = 8\nmax_steps = 50\n")
    result = checked(run, stricter.policy)
    assert any("for session 1, training.max_steps" in message for message in result.failures)
    strictest = replace(OWNER, limits="\n[training]\nmin_rows = 900\nmax_steps = 100\n")
    assert any("for the statement, training.min_rows" in message for message in checked(run, strictest.policy).failures)
    assert any("the policy of release-1.jwt.sha256" in message for message in result.failures)


def test_a_killed_run_has_no_end_and_its_next_session_says_so(fresh: Path) -> None:
    protected_run = make_run(fresh, OWNER, sessions=1, end="")
    (protected_run.directory / "best.tar.age").write_bytes(b"half")
    result = checked(protected_run)
    assert result.end is None
    assert result.failures == ["the run has no end: it was killed, is still running, or the end of its log was cut off"]
    assert any(message.startswith("best.tar.age: a killed session") for message in result.claimed)


def test_a_session_that_was_killed_and_resumed_has_no_cleanup_record(fresh: Path) -> None:
    for number, left_out in enumerate((["cleanup-1"], ["interrupted-1", "cleanup-1"])):
        changes = {name: lambda _: None for name in left_out}
        result = checked(make_run(fresh.with_name(f"run-{number}"), OWNER, changes, run=f"run-{number}"))
        assert result.verified
        assert "session 1 was killed: it has no cleanup record" in result.claimed


@pytest.mark.parametrize("end", ["failed", "interrupted"])
def test_a_session_that_the_broker_never_released_cannot_end_a_run(run: Made, end: str) -> None:
    keys = SessionKeys.generate()
    log = EvidenceLog.resume(run.directory, keys)
    claims = read_evidence((run.directory / "evidence-2.json").read_bytes()).claims
    claims |= {"keys": {"recipient": keys.data.recipient, "signing": keys.signing.public.pem}, "eat_nonce": digest("3")}
    log.attested(attest({**claims, "resume": {"sequence": log.sequence, "head": log.head}}, keys, quote=False))
    log.append(end, {})
    log.wiped({"complete": True, "wiped": [1], "not_wiped": [1]})
    for name in ("statement.json", "adapter.tar.age"):
        (run.directory / name).unlink()
    assert checked(run).failures == ["session 3 has no release: nobody endorses its lines"]


def test_the_command(run: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, policy, owner = tmp_path / "broker.pub", tmp_path / "policy.toml", OWNER
    key.write_text(owner.public.pem)
    policy.write_bytes(owner.policy_text())

    def answer(*arguments: Any) -> tuple[int, str, str]:
        code = main(["protect", "check", str(run.directory), *map(str, arguments)])
        return code, *capsys.readouterr()

    options = ("--broker-key", key, "--policy", policy, "--adapter", run.adapter)
    code, out, _ = answer(*options)
    assert code == 0
    assert out.splitlines()[-1].startswith("verified  proven, by the broker's key")
    assert out.count("\n") == 1
    assert answer()[1].startswith("unproven  proven: nothing but")
    code, out, _ = answer(*options, "--json")
    assert (code, json.loads(out)["verified"]) == (0, True)
    assert json.loads(out)["session_key"] == run.keys[-1].signing.public.pem
    (run.directory / "adapter.tar.age").write_bytes(b"")
    code, out, _ = answer(*options)
    assert code == 1
    assert "failed    SHA-256 of adapter.tar.age is" in out
    assert out.splitlines()[-1] == "failed    not verified: 1 part of the evidence failed"
    key.write_text(SigningKey.generate().public.pem)
    assert answer(*options)[0] == 1
    for wrong in (["--broker-key", policy], ["--policy", key], ["--adapter", key]):
        code, out, err = answer(*wrong)
        assert (code, out, err.count("\n")) == (2, "", 1), wrong
    (run.directory / NAME).unlink()
    assert answer()[0] == 2


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_an_adapter_with_links_or_special_files_is_not_read(run: Made) -> None:
    for make in (lambda path: path.symlink_to("/dev/zero"), os.mkfifo, lambda path: path.symlink_to(".")):
        make(run.adapter / "extra")
        with pytest.raises(UserError, match="extra is a link or a special file"):
            checked(run)
        (run.adapter / "extra").unlink()
