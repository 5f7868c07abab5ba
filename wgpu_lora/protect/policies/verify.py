"""`protect verify`: evidence, or the statement of a finished run, appraised by a policy, apart from training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError, reason
from wgpu_lora.protect.attestation import claims
from wgpu_lora.protect.attestation.claims import Evidence
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.evidence.dsse import EnvelopeError
from wgpu_lora.protect.evidence.run_statement import KIND, RUN, materials, parameters
from wgpu_lora.protect.policies.appraisal import appraise, failures_of
from wgpu_lora.protect.policies.claim_checks import Facts, Failed, claim
from wgpu_lora.protect.policies.fields import shown
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.policies.result import Appraisal, Failure

MOST_SESSIONS = 1000
EVIDENCE = "evidence-*.json"


@dataclass(frozen=True)
class Verification:
    """appraisal: the result. evidence: of the session. finished: whether it is about a finished run's statement."""

    appraisal: Appraisal
    evidence: Evidence
    finished: bool

    def subject(self) -> str:
        """What was appraised, and its job."""
        job = self.evidence.claims.get("job")
        name = job.get("name") if isinstance(job, Mapping) else None
        what = "statement of a finished run" if self.finished else "session"
        return what if name is None else f"{what} of the job {shown(name)}"


def verify(path: Path, policy: Policy, nonce: str | None, now: float) -> Verification:
    """Appraise a file of evidence, or a finished run's statement.json with the evidence of its session beside it.

    Args:
        nonce: the one that was issued; None checks no nonce. now: Unix time; a statement has no freshness to check.

    Raises:
        UserError: the file cannot be read, is neither of the two, or its signature does not fit; or no evidence beside
            a statement binds the key that signed it.
    """
    data = read(path)
    try:
        kind = dsse.peek(data)["predicateType"]
        if kind == KIND:
            if nonce is not None:
                raise UserError(f"{path} is the statement of a finished run, which has no nonce: leave --nonce out.")
            statement, evidence = _signed(data, path)
            return Verification(appraise_statement(statement, evidence, policy, now=now), evidence, True)
    except EnvelopeError as error:
        raise UserError(
            f"{path} is neither evidence nor a run's statement ({error.problem}): check the path."
        ) from None
    evidence = claims.read_evidence(data)
    return Verification(appraise(evidence, policy, nonce=nonce, now=now), evidence, False)


def appraise_statement(statement: Mapping[str, Any], evidence: Evidence, policy: Policy, *, now: float) -> Appraisal:
    """Appraise the statement of a finished run: its session's evidence, and what the run did.

    Args:
        statement: whose signature by the evidence's key has been verified.
        evidence: of the session that signed it. Its age and its nonce are not checked: they were at the release.
        now: of the result.
    """
    attested = appraise(evidence, policy, nonce=None, now=None)
    facts = {"statement": statement["predicate"], "claims": evidence.claims, "run": _run(statement)}
    checks = {
        "statement.materials": _materials,
        "statement.parameters": _parameters,
        "training.min_rows": None if policy.min_rows is None else _least("run.rows", policy.min_rows),
        "training.max_steps": None if policy.max_steps is None else _most("run.steps", policy.max_steps),
    }
    applied = {name: check for name, check in checks.items() if check is not None}
    failures = [Failure(name, *failed) for name in applied for failed in failures_of(applied[name], facts, "the run's")]
    return replace(
        attested,
        time=now,
        failures=[*attested.failures, *failures],
        applied=list(dict.fromkeys([*attested.applied, *applied])),
    )


def read(path: Path) -> bytes:
    """A signed file, of which too many bytes are refused. Raises UserError."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise UserError(f"{path} is not a regular file: give evidence, or a finished run's statement.json.")
        with path.open("rb") as file:
            return file.read(dsse.MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}): check the path.") from None


def _signed(data: bytes, path: Path) -> tuple[dict[str, Any], Evidence]:
    """A statement, and the evidence beside it that binds the key which signed it."""
    problem = "there is none"
    for beside in islice(sorted(path.parent.glob(EVIDENCE)), MOST_SESSIONS):
        evidence = claims.load_evidence(beside)
        try:
            return dsse.verify(data, evidence.signing), evidence
        except EnvelopeError as error:
            problem = error.problem
    raise UserError(
        f"{path} is not signed by a session whose {EVIDENCE} is beside it ({problem}): get the run's files."
    )


def _run(statement: Mapping[str, Any]) -> Any:
    """The facts of the run among the by-products; None if there are none."""
    details = statement["predicate"].get("runDetails")
    products = details.get("byproducts") if isinstance(details, Mapping) else None
    found = [one for one in products or () if isinstance(one, Mapping) and one.get("name") == RUN]
    return found[0].get("annotations") if len(found) == 1 else None


def _materials(facts: Facts) -> Iterator[Failed]:
    run = facts["run"]
    weights = run.get("weights_sha256") if isinstance(run, Mapping) else None
    if claim(facts, "statement.buildDefinition.resolvedDependencies", list) != materials(facts["claims"], weights):
        yield "the base, data, recipe and package of the evidence, and the weights of the run", "others"


def _parameters(facts: Facts) -> Iterator[Failed]:
    if claim(facts, "statement.buildDefinition.externalParameters", Mapping) != parameters(facts["claims"]):
        yield "the job, options and recipients of the evidence", "others"


def _least(path: str, least: int) -> Any:
    def check(facts: Facts) -> Iterator[Failed]:
        if (found := claim(facts, path, int)) < least:
            yield f"at least {least:,} rows trained", f"{found:,}"

    return check


def _most(path: str, most: int) -> Any:
    def check(facts: Facts) -> Iterator[Failed]:
        if not 0 < (found := claim(facts, path, int)) <= most:
            yield f"at most {most:,} steps done", f"{found:,}"

    return check
