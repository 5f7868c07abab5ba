"""wgpu-lora protect verify: evidence appraised by a policy."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.console import line, print_json
from wgpu_lora.cli.parameters import Json
from wgpu_lora.errors import UserError
from wgpu_lora.words import count_noun, join_words


def verify(
    evidence: Annotated[
        Path, typer.Argument(metavar="EVIDENCE", help="Evidence, or statement.json of a finished run.")
    ],
    policy: Annotated[Path, typer.Option(metavar="FILE", help="policy.toml: what the evidence must state.")],
    nonce: Annotated[
        str | None, typer.Option(help="The nonce that was issued for this evidence; not checked if not given.")
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Check as of this time (ISO 8601), for evidence that was kept.")
    ] = None,
    json: Json = False,
) -> int:
    """Appraise evidence by a policy, and name every rule that failed.

    Evidence is that of `protect attest`, or evidence-N.json of a run. Of a finished run, statement.json is checked with
    the evidence beside it: also the rows and steps that were trained. Exit code 0 if it passes, 1 if it does not.
    """
    from wgpu_lora.protect.extra import check_libraries

    check_libraries()
    from wgpu_lora.protect.policies import verify as verifying
    from wgpu_lora.protect.policies.policy import Policy

    now = time.time() if at is None else _time(at)
    rules = Policy.read(policy)
    found = verifying.verify(evidence, rules, nonce, now)
    result = found.appraisal
    if json:
        print_json(result.to_json())
        return 0 if result.passed else 1
    line("policy", f"{rules.name}, version {rules.version}, SHA-256 {rules.sha256}")
    line("evidence", f"{found.subject()}, SHA-256 {result.evidence_sha256}, {result.level}")
    for failure in result.failures:
        line("failed", failure.line())
    if result.not_applied:
        line(
            "unchecked", f"not restricted by the policy, or without a value to check: {join_words(result.not_applied)}"
        )
    checked = count_noun(len(result.applied), "rule")
    failed = {failure.rule for failure in result.failures}
    line("result", f"passed: {checked}" if result.passed else f"refused: {len(failed)} of {checked} failed")
    return 0 if result.passed else 1


def _time(text: str) -> float:
    """Unix time of a date; without a zone it is in UTC."""
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise UserError(f"--at must be a time such as 2026-01-31T12:00:00Z, not {text!a:.60}.") from None
