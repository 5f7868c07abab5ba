"""7. Greedy answers to the held-out requests pass their unit checks more often after training."""

from __future__ import annotations

from wgpu_lora.checks.asserts import parse_check
from wgpu_lora.checks.confine.parent import confinement
from wgpu_lora.errors import UserError
from wgpu_lora.proof.context import Proof
from wgpu_lora.proof.finding import Finding, NotRun
from wgpu_lora.proof.heldout import request_of, rows_of
from wgpu_lora.train.options.arguments import TrainingArguments

MARGIN = 0.1  # of the requests: how many more must pass after training


def answers_pass_their_checks(proof: Proof, finding: Finding) -> str:
    """Passes if more answers pass after training, by the margin."""
    assert proof.args.eval_data
    rows = list(rows_of(proof.args.eval_data).values())
    if not all("check" in row for row in rows):
        raise NotRun("the held-out rows have no unit checks")
    if not all(request_of(row) for row in rows):
        raise NotRun("a held-out row with a unit check is not a conversation with a message before its last answer")
    seen, count = proof.seen_rows
    if seen:
        raise NotRun(f"{seen} of {count} held-out rows are training rows too: their answers could be memorised")
    adapters = {"before": proof.args.init_adapter, "after": str(proof.trained().directory)}
    options = {"options": proof.args.as_dict(), "device": proof.used()[0], "allow_unconfined": proof.allow_unconfined}
    found = {
        when: proof.children.run(f"answers-{when}", "proof-answers", adapter=adapter, **options)
        for when, adapter in adapters.items()
    }
    finding.figures["margin"] = MARGIN
    for when, answers in found.items():
        parsed, passed = (sum(answer[name] for answer in answers) for name in ("parses", "passed"))
        score = {"requests": len(answers), "parsed": parsed, "passed": passed, "pass_rate": passed / len(answers)}
        finding.figures[when] = score
    was, now = (finding.figures[when]["passed"] for when in found)
    finding.figures["answers"] = [
        {"request": before.pop("request"), "before": before, "after": {name: after[name] for name in before}}
        for before, after in zip(*found.values(), strict=True)
    ]
    fault = f"{was} of {len(rows)} answers passed before training and {now} after, but {MARGIN:.0%} more had to"
    finding.expect(now - was >= MARGIN * len(rows), fault)
    parsed = finding.figures["after"]["parsed"]
    return f"{was} of {len(rows)} answers passed before training and {now} after, when {parsed} could be parsed"


def check_answers_can_run(args: TrainingArguments, allow_unconfined: bool) -> None:
    """Called before training.

    Raises:
        UserError: a unit check is invalid, or answers cannot be confined and that is not allowed.
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
