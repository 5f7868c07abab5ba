"""`protect check` against whoever can change a run's files, and whoever could even sign something else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.policies import digest
from support.protected_runs import Change, DataOwner, Made, make_run

from wgpu_lora.atomic import file_digest
from wgpu_lora.cli import main
from wgpu_lora.errors import UserError
from wgpu_lora.protect.check import Checked, check
from wgpu_lora.protect.claims import read_evidence
from wgpu_lora.protect.keys import SessionKeys, SigningKey
from wgpu_lora.protect.log import NAME, EvidenceLog
from wgpu_lora.protect.policy import Policy
from wgpu_lora.protect.statement import RunFacts, write_statement

OWNER = DataOwner()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Made, Made, Made, Path]]:
    """A run, another one of the same job, one of another job, and the anchors of all."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WGPU_LORA_DATA_DIR", str(root / "data"))
        made = make_run(root / "a", OWNER), make_run(root / "b", OWNER, run="run-2")
        yield *made, make_run(root / "c", OWNER, run="run-3", job="ward-8"), root / "data"


@pytest.fixture
def run(originals: tuple[Made, Made, Made, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A copy of the run, on the machine that made it."""
    made = originals[0]
    for name in (made.directory, made.adapter):
        shutil.copytree(name, tmp_path / name.name)
    shutil.copytree(originals[3], tmp_path / "data")
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "data"))
    return Made(tmp_path / made.directory.name, tmp_path / made.adapter.name, made.keys)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run can be made, on another machine, quickly."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "fresh-data"))
    return tmp_path / "fresh"


def checked(made: Made, policy: Policy | None = None, owner: DataOwner = OWNER) -> Checked:
    return check(made.directory, owner.public, policy or owner.policy, made.adapter if made.adapter.exists() else None)


def test_a_run_is_verified_and_says_what_is_only_claimed(run: Made) -> None:
    found = checked(run)
    assert (found.failures, found.end, found.run) == ([], "finished", "run-1")
    assert "5 sealed files are those of the log" in found.proven
    assert "this is the newest state that this machine wrote" in found.proven
    assert "2 sessions' keys were attested to the broker, which released the data's key to them" in found.proven
    assert "the claims of every session about its software and device (self-reported)" in found.claimed
    assert found.line().startswith(f"proven, by the broker's key {OWNER.public.keyid[:12]}: ")
    alone = check(run.directory)
    assert alone.verified
    assert alone.proven == ["this is the newest state that this machine wrote"]
    assert "nothing but that the files fit each other" in alone.line()


def test_every_flipped_file_is_found(run: Made) -> None:
    files = [path for path in sorted([*run.directory.rglob("*"), *run.adapter.rglob("*")]) if path.is_file()]
    assert len(files) == 16
    for path in files:
        content = path.read_bytes()
        for at in (len(content) // 3, len(content) - 1):
            path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            found = checked(run)
            assert found.failures, (path, at)
            assert found.proven == []
        path.write_bytes(content[:-1] if path.name == NAME else content[: len(content) // 2])
        assert checked(run).failures, path
        path.write_bytes(content)
    assert checked(run).verified


def test_every_removed_file_is_found_but_older_checkpoints_and_the_copy_of_the_job(run: Made) -> None:
    spared = ("job.toml", "step-2.tar.age", "step-4.tar.age", "step-6.tar.age")
    for path in [path for path in [*run.directory.rglob("*"), *run.adapter.rglob("*")] if path.is_file()]:
        kept = path.read_bytes()
        path.unlink()
        if path.name == NAME:
            with pytest.raises(UserError, match=r"has no evidence.jsonl"):
                checked(run)
        else:
            assert checked(run).verified == (path.name in spared), path
        path.write_bytes(kept)


def test_a_log_cut_off_at_any_line_is_found_even_without_an_anchor(run: Made, fresh: Path) -> None:
    path = run.directory / NAME
    lines = path.read_bytes().splitlines(True)
    endless = 0
    for left in range(len(lines)):
        path.write_bytes(b"".join(lines[:left]))
        found = checked(run)
        assert found.failures, left
        endless += any("has no end" in said for said in found.failures)
        for name in ("statement.json", "cleanup.json", "adapter.tar.age"):
            (run.directory / name).rename(run.directory.parent / name)
        found = checked(run)
        assert found.failures, left  # the whole end of the run is gone
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
    found = checked(replace(old, directory=before))
    assert any("had come to line" in said for said in found.failures)
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "second"))
    found = checked(replace(old, directory=before))
    assert found.verified
    assert any("no anchor on this machine" in said for said in found.claimed)


@pytest.mark.parametrize("other", [1, 2], ids=["another run", "another job"])
def test_files_of_another_run_are_found(run: Made, originals: tuple[Made, Made, Made, Path], other: int) -> None:
    theirs = originals[other]
    names = [path.relative_to(run.directory) for path in run.directory.rglob("*") if path.suffix in (".json", ".jsonl")]
    names += [Path(f"release-{number}.jwt") for number in (1, 2)]
    assert len(names) == 7
    for name in names:
        kept = (run.directory / name).read_bytes()
        shutil.copy(theirs.directory / name, run.directory / name)
        assert checked(run).failures, name
        (run.directory / name).write_bytes(kept)
    assert checked(replace(run, adapter=theirs.adapter)).failures
    for one, two in (
        ("checkpoints/step-6.tar.age", "checkpoints/step-8.tar.age"),
        ("evidence-1.json", "evidence-2.json"),
    ):
        contents = [(run.directory / name).read_bytes() for name in (one, two)]
        for name, content in zip((two, one), contents, strict=True):
            (run.directory / name).write_bytes(content)
        assert checked(run).failures, one
        for name, content in zip((one, two), contents, strict=True):
            (run.directory / name).write_bytes(content)
    assert checked(run).verified


def test_a_file_that_the_log_does_not_name_is_found(run: Made) -> None:
    (run.directory / "best.tar.age").write_bytes(b"sealed to somebody else")
    assert checked(run).failures == ["best.tar.age is not in the log"]
    (run.directory / "best.tar.age").unlink()
    (run.directory / "adapter.tar.age").rename(run.directory.parent / "elsewhere")
    (run.directory / "adapter.tar.age").symlink_to(run.directory.parent / "elsewhere")
    assert any("not a regular file of the run" in said for said in checked(run).failures)


def test_a_log_signed_anew_by_somebody_else_is_only_claimed(fresh: Path) -> None:
    attacker = DataOwner(data=OWNER.data)  # has a broker's key of its own
    made = make_run(fresh, attacker)
    found = checked(made)
    assert not found.verified
    assert sum("not signed by this broker's key" in said for said in found.failures) == 2
    alone = check(made.directory, adapter=made.adapter)
    assert alone.verified
    assert any("attested to a broker: no broker's key was given" in said for said in alone.claimed)


def test_another_policy_than_the_releases_is_not_accepted(run: Made) -> None:
    stricter = replace(OWNER, limits="\n[training]\nmin_rows = 8\nmax_steps = 50\n")
    found = checked(run, stricter.policy)
    assert any("for session 1, training.max_steps" in said for said in found.failures)
    strictest = replace(OWNER, limits="\n[training]\nmin_rows = 900\nmax_steps = 100\n")
    assert any("for the statement, training.min_rows" in said for said in checked(run, strictest.policy).failures)
    assert any("the policy of release-1.jwt.sha256" in said for said in found.failures)


def put(path: str, value: Any) -> Change:
    """Sets a value in nested dicts, lists and tuples; `...` removes it."""
    names = path.split(".")

    def change(root: Any) -> Any:
        place, steps = root, [int(name) if name.isdigit() else name for name in names]
        for step in steps[:-1]:
            place = place[step]
        if value is ...:
            del place[steps[-1]]
        else:
            place[steps[-1]] = value
        return root

    return change


def facts(**values: Any) -> Change:
    return lambda line: ({**line[0], **values}, line[1])


def subjects(*values: tuple[str, str]) -> Change:
    return lambda line: (line[0], list(values))


def record(**values: Any) -> Change:
    return lambda found: {**found, **values}


def stated(place: int, change: Change) -> Change:
    """Changes one of the statement's parts: its claims, the adapter's digests, the sealed adapter, the facts."""
    return lambda parts: (*parts[:place], change(parts[place]), *parts[place + 1 :])


def replacing(**values: Any) -> Change:
    return lambda run_facts: replace(run_facts, **values)


SOME = digest("something else")
GONE: Change = lambda _: None  # noqa: E731
# What a session could sign, or a broker release, that does not fit: every field that check covers.
LIES: dict[str, tuple[str, Change, str]] = {
    "resume at a first start": ("claims-1", put("resume", {"sequence": 3, "head": SOME}), "evidence-1.json states"),
    "no resume": ("claims-2", put("resume", ...), "evidence-2.json states.head is missing"),
    "an older line": ("claims-2", put("resume.sequence", 4), "evidence-2.json states.sequence is 4, expected"),
    "another head": ("claims-2", put("resume.head", SOME), "evidence-2.json states.head"),
    "old claims": ("claims-1", put("iat", 1_700_000_000), "evidence-1.json was made .* before"),
    "claims of the future": ("claims-1", put("iat", 2_000_000_000), "evidence-1.json was made"),
    "another job": ("claims-2", put("job.name", "ward-8"), "the job of session 2.name"),
    "other data than before": ("claims-2", put("job.data.0.sha256", SOME), r"the job of session 2.data\[0\].sha256"),
    "another file of the job": ("claims-2", put("job.sha256", SOME), "the job of session 2.sha256"),
    "another owner": ("claims-2", put("job.recipients.0", "age1x"), "the job of session 2.recipients"),
    "another option": ("claims-2", put("job.options.learning_rate", 1.0), "the job of session 2.options.learning_rate"),
    "a nonce twice": ("claims-2", put("eat_nonce", digest("run-1 1")), "two sessions have the same nonce"),
    "iss": ("release-1", put("iss", SOME), "iss of release-1.jwt"),
    "aud": ("release-2", put("aud", SOME), "aud of release-2.jwt"),
    "sub": ("release-1", put("sub", "ward-8"), "sub of release-1.jwt is 'ward-8'"),
    "eat_nonce": ("release-1", put("eat_nonce", SOME), "eat_nonce of release-1.jwt"),
    "ear.status": ("release-2", lambda root: {**root, "ear.status": "warning"}, "ear.status of release-2.jwt"),
    "evidence_sha256": ("release-1", put("evidence_sha256", SOME), "evidence_sha256 of release-1.jwt"),
    "recipient": ("release-1", put("recipient", "age1other"), "released is not among the job's recipients"),
    "expired": ("release-1", put("exp", 1_700_000_000), "release-1.jwt had expired"),
    "an old release": ("release-2", put("iat", 1_700_000_000), "release-2.jwt was not issued between"),
    "a release of the future": ("release-2", put("iat", 2_000_000_000), "release-2.jwt was not issued between"),
    "another policy": ("release-1", put("policy.version", 2), "the policy of release-1.jwt.version is 2"),
    "too few rows": ("opened-1", facts(trained_rows=7), "session 1 trained on 7 rows, fewer than 8"),
    "no rows": ("opened-2", lambda line: ({}, line[1]), "session 2 trained on 0 rows"),
    "too many steps": ("checkpoint-2", facts(step=101), "session 2 has step 8 after step 101"),
    "over the limit": ("release-2", put("max_steps", 7), "session 2 took 8 steps, more than 7"),
    "other data": ("opened-1", subjects(("data", SOME), ("eval_data", SOME)), "the data of session 1"),
    "less data": ("opened-2", subjects(("data", digest("train"))), "the data of session 2"),
    "nothing opened": ("opened-1", GONE, "session 1 trained without opening data"),
    "another checkpoint": ("resumed-2", subjects(("checkpoints/step-2.tar.age", SOME)), "that session 2 resumed from"),
    "another step": ("resumed-2", facts(step=2), "the step that session 2 resumed from is 2, expected 4"),
    "no end": ("finished-2", GONE, "the run has no end"),
    "no cleanup": ("cleanup-2", GONE, "session 2 ended without a cleanup record"),
    "no cleanup before": ("cleanup-1", GONE, "session 1 ended without a cleanup record"),
    "nothing wiped": ("cleanup-2", record(wiped=[]), "does not say what was wiped"),
    "all wiped": ("cleanup-1", record(not_wiped=[]), "does not say what was not wiped"),
    "a wipe failed": ("cleanup-2", record(complete=False), "the cleanup of session 2 is not complete: .*immutable"),
    "no statement": ("statement-2", GONE, "statement.json does not exist"),
    "no finite loss": ("finished-2", facts(final_loss=float("nan")), "the run has no finite final loss"),
    "a loss in words": ("finished-2", facts(final_loss="low"), "final_loss is 'low'"),
    "an unknown fact": ("finished-2", facts(overhead=0.1), "has the unknown fact 'overhead'"),
    "fewer steps at the end": ("finished-2", facts(steps=7), "session 2 has step 7 after step 8"),
}  # fmt: skip


@pytest.mark.parametrize(("where", "change", "said"), LIES.values(), ids=LIES.keys())
def test_what_was_signed_but_does_not_fit_is_named(fresh: Path, where: str, change: Change, said: str) -> None:
    found = checked(make_run(fresh, OWNER, {where: change}, sessions=int(where[-1])))
    assert any(re.search(said, failure) for failure in found.failures), found.failures
    assert not found.proven


ODD: list[tuple[str, Change]] = [
    *(
        ("claims-1", put(name, value))
        for name in ("package", "job", "iat", "device", "base")
        for value in (None, [1], "x")
    ),
    *(("claims-1", put(name, [])) for name in ("job.data", "job.recipients", "job.name")),
    ("claims-1", put("iat", 10**400)),
    ("claims-1", put("resume", "x")),
    ("release-1", put("iat", 10**400)),
    *(("checkpoint-1", facts(step=value)) for value in ("x", None, [])),
    ("checkpoint-1", subjects(("../../etc/passwd", SOME))),
    ("checkpoint-1", subjects(("x" * 5000, SOME), ("/dev/zero", SOME), ("", SOME))),
    ("opened-1", facts(trained_rows="many")),
    ("finished-1", facts(steps="many", rows={})),
    ("cleanup-1", record(wiped=7, not_wiped="x")),
]


@pytest.mark.parametrize(("where", "change"), ODD)
def test_odd_values_fail_and_nothing_else(fresh: Path, where: str, change: Change) -> None:
    try:
        made = make_run(fresh, OWNER, {where: change}, sessions=1)
    except (TypeError, LookupError, AttributeError, UserError):
        made = Made(fresh, fresh.with_name("fresh-adapter"), [])  # as far as it came
    if not (fresh / NAME).read_bytes():
        pytest.skip("the helper itself could not begin")
    assert checked(made).failures


# The statement alone could state something else.
MISSTATED: dict[str, tuple[Change, str]] = {
    "another base": (stated(0, put("base.sha256", SOME)), "resolvedDependencies"),
    "other stated data": (stated(0, put("job.data.0.sha256", SOME)), "resolvedDependencies"),
    "another recipe": (stated(0, put("job.recipe_sha256", SOME)), "resolvedDependencies"),
    "another package": (stated(0, put("package.sha256", SOME)), "resolvedDependencies"),
    "another wgpu-native": (stated(0, put("wgpu.native_sha256", SOME)), "resolvedDependencies"),
    "other options": (stated(0, put("job.options.max_steps", 9)), "Parameters.options.max_steps"),
    "another device": (stated(0, put("device.name", "H100")), "internalParameters.device.name"),
    "another version": (stated(0, put("package.version", "9")), "builder.version"),
    "another adapter": (stated(1, record(**{"adapter_config.json": SOME})), "SHA-256 of the adapter"),
    "less of the adapter": (stated(1, lambda all: dict([*all.items()][1:])), "SHA-256 of the adapter"),
    "nothing of the adapter": (stated(1, lambda _: {}), "names no file of the adapter"),
    "another sealed adapter": (stated(2, lambda _: ("adapter.tar.age", SOME)), "the sealed adapter"),
    **{
        f"another {name}": (stated(3, replacing(**{name: value})), rf"annotations.{name} is")
        for name, value in {
            "steps": 9, "elapsed_seconds": 9.0, "stop_reason": "max_steps", "target_seconds": 9.0, "budget_steps": 9,
            "initial_loss": 9.0, "final_loss": 0.1, "best_loss": 0.1, "rows": 9, "tokens": 9,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), MISSTATED.values(), ids=MISSTATED.keys())
def test_a_statement_that_does_not_agree_with_the_log_is_named(run: Made, change: Change, said: str) -> None:
    log = EvidenceLog.resume(run.directory, run.keys[-1])
    claims = read_evidence((run.directory / "evidence-2.json").read_bytes()).claims
    end = next(entry for entry in log.entries if entry.stage == "finished")
    adapter = {path.name: file_digest(path) for path in run.adapter.iterdir()}
    write_statement(log, *change((claims, adapter, end.subjects[0], RunFacts(**end.facts))))
    found = checked(run)
    assert any(re.search(said, failure) for failure in found.failures), found.failures


def test_a_killed_run_has_no_end_and_its_next_session_says_so(fresh: Path) -> None:
    made = make_run(fresh, OWNER, sessions=1, end="")
    (made.directory / "best.tar.age").write_bytes(b"half")
    found = checked(made)
    assert found.end is None
    assert found.failures == ["the run has no end: it was killed, is still running, or the end of its log was cut off"]
    assert any(said.startswith("best.tar.age: a killed session") for said in found.claimed)


def test_a_session_that_was_killed_and_resumed_has_no_cleanup_record(fresh: Path) -> None:
    found = checked(make_run(fresh, OWNER, {"interrupted-1": GONE, "cleanup-1": GONE}))
    assert found.verified
    assert "session 1 was killed: it has no cleanup record" in found.claimed


def test_the_command(run: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, policy, owner = tmp_path / "broker.pub", tmp_path / "policy.toml", OWNER
    key.write_text(owner.public.pem)
    policy.write_bytes(owner.policy_text())

    def answer(*arguments: Any) -> tuple[int, str, str]:
        code = main(["protect", "check", str(run.directory), *map(str, arguments)])
        return code, *capsys.readouterr()

    given = ("--broker-key", key, "--policy", policy, "--adapter", run.adapter)
    code, out, _ = answer(*given)
    assert code == 0
    assert out.splitlines()[-1].startswith("verified  proven, by the broker's key")
    code, out, _ = answer(*given, "--json")
    assert (code, json.loads(out)["verified"]) == (0, True)
    (run.directory / "adapter.tar.age").write_bytes(b"")
    code, out, _ = answer(*given)
    assert code == 1
    assert "failed    SHA-256 of adapter.tar.age is" in out
    assert out.splitlines()[-1] == "failed    not verified: 1 part of the evidence failed"
    key.write_text(SigningKey.generate().public.pem)
    assert answer(*given)[0] == 1
    for wrong in (["--broker-key", policy], ["--policy", key], ["--adapter", key]):
        code, out, err = answer(*wrong)
        assert (code, out, err.count("\n")) == (2, "", 1), wrong
    (run.directory / NAME).unlink()
    assert answer()[0] == 2
