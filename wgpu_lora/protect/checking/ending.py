"""The end of a run: its statement, which must agree with the log in every field, and the adapter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import file_digest
from wgpu_lora.protect.checking.findings import Findings, digest_of, small_file
from wgpu_lora.protect.checking.sessions import ENDS, Session
from wgpu_lora.protect.evidence import envelope, statement
from wgpu_lora.protect.evidence.chain import Entry
from wgpu_lora.protect.evidence.log import CLEANUP
from wgpu_lora.protect.evidence.signing import verify_model
from wgpu_lora.protect.evidence.statement import ADAPTER, RunFacts
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.policies.verify import appraise_statement


def check_end(
    run: Path, sessions: Sequence[Session], policy: Policy | None, adapter: Path | None, found: Findings
) -> str | None:
    """Verify how a run ended, and say it; None if it has no end."""
    ends = sessions[-1].named(*ENDS)
    if not ends:
        found.fail("the run has no end: it was killed, is still running, or the end of its log was cut off")
        return None
    if ends[-1].stage != "finished":
        if (run / statement.NAME).exists():
            found.fail(f"{statement.NAME} is there although the log's end is {ends[-1].stage!r}")
        return ends[-1].stage
    with found.part("the line 'finished'"):
        _check_facts(ends[-1], found)
    with found.part(statement.NAME):
        made = _check_statement(run, sessions, ends[-1], adapter, found)
        evidence = sessions[-1].evidence
        if policy is not None and evidence is not None:
            appraisal = appraise_statement(made, evidence, policy, now=ends[-1].seconds)
            for failure in appraisal.failures:
                found.fail(f"the policy for the statement, {failure.line()}")
    if adapter is not None:
        with found.part("the adapter"):
            verify_model(adapter, sessions[-1].key)
            found.proven.append("the adapter's files are those that the session signed (OpenSSF model signing)")
    return "finished"


def _check_facts(line: Entry, found: Findings) -> None:
    """The figures of the end are there, and are numbers."""
    names = {item.name for item in fields(RunFacts)}
    for name in sorted(names ^ set(line.facts)):
        found.fail(f"the line 'finished' {'lacks' if name in names else 'has the unknown fact'} {name!r}")
    for name in ("initial_loss", "final_loss", "best_loss", "elapsed_seconds"):
        value = line.facts.get(name)
        if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
            found.fail(f"{name} is {value!r:.40}")
    if line.facts.get("final_loss") is None:
        found.fail("the run has no finite final loss")


def _check_statement(
    run: Path, sessions: Sequence[Session], end: Entry, adapter: Path | None, found: Findings
) -> dict[str, Any]:
    made = envelope.verify(small_file(run, statement.NAME), sessions[-1].key)
    found.expect(f"the predicate type of {statement.NAME}", made["predicateType"], statement.KIND)
    entries = [entry for session in sessions for entry in session.entries]
    cleanup = digest_of(small_file(run, CLEANUP))
    expected = statement.provenance(entries, sessions[-1].claims, cleanup, end.facts)
    agrees = found.expect(statement.NAME, made["predicate"], expected)
    subjects = {item["name"]: item["digest"]["sha256"] for item in made["subject"]}
    sealed = {name: digest for name, digest in subjects.items() if not name.startswith(ADAPTER)}
    plain = {name.removeprefix(ADAPTER): digest for name, digest in subjects.items() if name.startswith(ADAPTER)}
    agrees &= found.expect("the sealed adapter of the statement", sealed, dict(end.subjects))
    if not plain or not sealed:
        found.fail(f"{statement.NAME} names no file of the adapter")
    if adapter is not None:
        found.expect(f"SHA-256 of the adapter {adapter}", _digests(adapter), plain)
    if agrees:
        found.proven.append("the statement agrees with the log and the evidence")
    return made


def _digests(directory: Path) -> dict[str, Any]:
    files = [path for path in sorted(directory.rglob("*")) if not path.is_dir()]
    return {path.relative_to(directory).as_posix(): file_digest(path) for path in files}
