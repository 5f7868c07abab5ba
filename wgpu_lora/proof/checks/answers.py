"""7. Greedy answers to the held-out requests, parsed and run against their unit checks, before and after."""

from __future__ import annotations

from typing import Any

from wgpu_lora.demo.asserts import parse_check
from wgpu_lora.demo.confine.parent import confinement
from wgpu_lora.errors import UserError
from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Finding, NotRun
from wgpu_lora.proof.heldout import request_of, rows_of
from wgpu_lora.train.arguments import TrainingArguments

MARGIN = 0.1  # of the requests, that more have to pass after


def answers_pass_their_checks(proof: Proof) -> Finding:
    """Passes where more answers pass after training, by the margin."""
    assert proof.args.eval_data
    rows = list(rows_of(proof.args.eval_data).values())
    if not all("check" in row for row in rows):
        raise NotRun("the held-out rows have no unit checks")
    if not all(request_of(row) for row in rows):
        raise NotRun("a held-out row with a unit check is no conversation with something before its last answer")
    seen, count = proof.seen_rows()
    if seen:
        raise NotRun(f"{seen} of {count} held-out rows are training rows too: their answers could be known by heart")
    training = proof.trained()
    before = proof.answers("answers-before", proof.args.init_adapter)
    after = proof.answers("answers-after", str(training.directory))
    scores = {"before": score(before), "after": score(after)}
    was, now = scores["before"]["passed"], scores["after"]["passed"]
    faults = []
    if not now - was >= MARGIN * len(rows):
        faults.append(f"{was} of {len(rows)} answers passed before and {now} after: {MARGIN:.0%} more had to")
    figures = {"margin": MARGIN, **scores, "answers": paired(before, after)}
    reason = f"{was} of {len(rows)} passed before, {now} after ({scores['after']['parsed']} parse)"
    return Finding.of(faults, reason, figures)


def check_answers_can_run(args: TrainingArguments, allow_unconfined: bool) -> None:
    """Before anything is trained.

    Raises:
        UserError: a unit check is not understood, or answers cannot be confined and that is not allowed.
    """
    assert args.eval_data
    rows = rows_of(args.eval_data)
    if all("check" in row for row in rows.values()):
        for where, row in rows.items():
            parse_check(row["check"], f"{where},")
        try:
            confinement(allow_unconfined)
        except UserError as error:
            raise UserError(f"{str(error).removesuffix('.')}, or leave out check 7 by --only.") from None


def score(answers: list[dict[str, Any]]) -> dict[str, Any]:
    passed = sum(answer["passed"] for answer in answers)
    return {
        "requests": len(answers),
        "parsed": sum(answer["parses"] for answer in answers),
        "passed": passed,
        "pass_rate": passed / len(answers),
    }


def paired(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By request: what was answered before and after, and the verdicts."""

    def said(answer: dict[str, Any]) -> dict[str, Any]:
        return {name: answer[name] for name in ("text", "parses", "passed", "reason")}

    return [{"request": a["request"], "before": said(a), "after": said(b)} for a, b in zip(before, after, strict=True)]
