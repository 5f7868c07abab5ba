"""`protect check` against sessions and brokers that sign what does not fit: every field that it covers."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.protect.policies import digest
from support.protect.protected_runs import Change, DataOwner, Made, checked_run, make_run

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.protect.attestation.claims import read_evidence
from wgpu_lora.protect.evidence.run_evidence import NAME, EvidenceLog
from wgpu_lora.protect.evidence.run_statement import RunFacts, write_statement

OWNER = DataOwner()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run can be made, quickly."""
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr("os.fsync", lambda _: None)
    return tmp_path / "run"


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
    return lambda original: {**original, **values}


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
    "another line than the broker knew": ("release-2", put("known", [{"sequence": 3, "head": SOME}]), "another line 4"),
    "a line that the log never had": ("release-2", put("known", [{"sequence": 99, "head": SOME}]), "another line 100"),
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
    "nothing wiped": ("cleanup-2", record(wiped=[]), "does not say what was wiped"),
    "all wiped": ("cleanup-1", record(not_wiped=[]), "does not say what was not wiped"),
    "a wipe failed": ("cleanup-2", record(complete=False), "the cleanup of session 2 is not complete: .*immutable"),
    "no statement": ("statement-2", GONE, "statement.json does not exist"),
    "no finite loss": ("finished-2", facts(final_loss=float("nan")), "the run has no finite final loss"),
    "a loss in words": ("finished-2", facts(final_loss="low"), "'final_loss' must be a number"),
    "an unknown fact": ("finished-2", facts(overhead=0.1), "'overhead' is not known"),
    "fewer steps at the end": ("finished-2", facts(steps=7), "session 2 has step 7 after step 8"),
}  # fmt: skip


def test_what_was_signed_but_does_not_fit_is_named(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (where, change, message) in enumerate(LIES.values()):
        monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(fresh.with_name(f"data-{number}")))
        run = make_run(fresh.with_name(f"{number}"), OWNER, {where: change}, sessions=int(where[-1]))
        result = checked_run(OWNER, run)
        assert any(re.search(message, failure) for failure in result.failures), (message, result.failures)
        assert not result.proven


ODD: list[tuple[str, Change]] = [
    *(("claims-1", put(name, value)) for name in ("package", "job", "iat", "base") for value in (None, [1], "x")),
    *(("claims-1", put(name, [])) for name in ("job.data", "job.recipients", "job.name")),
    ("claims-1", put("iat", 10**400)),
    ("claims-1", put("resume", "x")),
    ("release-1", put("iat", 10**400)),
    *(("release-1", put("known", [value])) for value in (7, {}, {"sequence": -1, "head": SOME})),
    *(("checkpoint-1", facts(step=value)) for value in ("x", None, [])),
    ("checkpoint-1", subjects(("../../etc/passwd", SOME))),
    ("checkpoint-1", subjects(("x" * 5000, SOME), ("/dev/zero", SOME), ("", SOME))),
    ("opened-1", facts(trained_rows="many")),
    ("finished-1", facts(steps="many", rows={})),
    ("cleanup-1", record(wiped=7, not_wiped="x")),
]


def test_odd_values_fail_and_nothing_else(fresh: Path) -> None:
    checked = 0
    for number, (where, change) in enumerate(ODD):
        place = fresh.with_name(f"{number}")
        try:
            run = make_run(place, OWNER, {where: change}, f"{number}", sessions=1)
        except (TypeError, LookupError, AttributeError, UserError):
            run = Made(place, fresh.with_name("none"), [])  # as far as it came
        if (place / NAME).read_bytes():  # else the helper itself could not begin
            checked += 1
            assert checked_run(OWNER, run).failures, number
    assert checked > len(ODD) // 2


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
            "initial_loss": 9.0, "final_loss": 0.1, "best_loss": 0.1, "rows": 9, "tokens": 9, "weights_sha256": SOME,
        }.items()
    },
}  # fmt: skip


def test_a_statement_that_does_not_agree_with_the_log_is_named(fresh: Path) -> None:
    run = make_run(fresh, OWNER)
    log = EvidenceLog.resume(run.directory, run.keys[-1])
    claims = read_evidence((run.directory / "evidence-2.json").read_bytes()).claims
    end = next(entry for entry in log.entries if entry.stage == "finished")
    adapter = {path.name: file_digest(path) for path in run.adapter.iterdir()}
    for change, message in MISSTATED.values():
        parts = copy.deepcopy((claims, adapter, end.subjects[0], RunFacts(**end.facts)))
        write_statement(log, *change(parts))
        result = checked_run(OWNER, run)
        assert any(re.search(message, failure) for failure in result.failures), (message, result.failures)
