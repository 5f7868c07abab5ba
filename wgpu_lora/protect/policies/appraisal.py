"""The appraisal of evidence by a policy (RATS, RFC 9334): a pure function that names every rule that failed.

Its result is an EAR (draft-ietf-rats-ear: EAT attestation results). Of AR4SI's trustworthiness claims
(draft-ietf-rats-ar4si) only those are made that the evidence can justify.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import read_bytes
from wgpu_lora.protect.attestation import claims
from wgpu_lora.protect.attestation.claims import Evidence
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.evidence.run_statement import KIND, RUN, materials, parameters
from wgpu_lora.protect.policies.claim_checks import (
    ClaimError,
    Facts,
    Mismatch,
    any_of,
    claim,
    claim_or_none,
    failures_of,
    value_text,
)
from wgpu_lora.protect.policies.policy import RULES, Policy

# What is checked whatever the policy says; seconds are its own.
KEYS, NONCE, AGE, AHEAD, HEAD = "evidence.keys", "evidence.nonce", "nonce.seconds", "nonce.skew", "evidence.resume"
MOST_SESSIONS = 1000
EVIDENCE = "evidence-*.json"
PROFILE = "tag:github.com,2023:veraison/ear"  # the profile of EAR's implementations
# AR4SI: the claim that a section's failure contradicts. 33 and 97 stand for what is not recognised; failures that have
# no standard value get one of the private range for contraindications.
VECTOR = {
    "attestation": ("instance-identity", 97),
    "device": ("hardware", 97),
    **dict.fromkeys(("package", "wgpu", "python", "dependencies", "process"), ("executables", 33)),
    **dict.fromkeys(("kernel", "host", "environment", "job", "recipe", "training"), ("configuration", -97)),
    **dict.fromkeys(("base", "data"), ("sourced-data", -97)),
}
# Name, what is expected, and the failures; None if there is nothing to compare the claims with.
Checks = list[tuple[str, str, Callable[[Facts], Iterator[Mismatch]] | None]]


@dataclass(frozen=True)
class Failure:
    """A rule that failed. rule: `section.key` of the policy, or what is always checked."""

    rule: str
    expected: str
    found: str

    def line(self) -> str:
        return f"{self.rule}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Appraisal:
    """What a verifier found.

    applied: the rules that were checked, passed or not. not_applied: those that the policy leaves out, and checks for
    which the verifier had no value, such as the expected nonce.
    """

    policy: Mapping[str, Any]
    evidence_sha256: str
    nonce: str | None
    time: float
    level: str
    failures: Sequence[Failure]
    applied: Sequence[str]
    not_applied: Sequence[str]

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """An attestation result with EAR's names; those of this package start with `ear.wgpu-lora.`."""
        submodule: dict[str, Any] = {
            "ear.status": "affirming" if self.passed else "contraindicated",
            "ear.appraisal-policy-ids": [f"{self.policy['name']}:{self.policy['version']}"],
            "ear.wgpu-lora.policy": dict(self.policy),
            "ear.wgpu-lora.evidence-sha256": self.evidence_sha256,
            "ear.wgpu-lora.level": self.level,
            "ear.wgpu-lora.failures": [asdict(failure) for failure in self.failures],
            "ear.wgpu-lora.applied": [*self.applied],
            "ear.wgpu-lora.not-applied": [*self.not_applied],
        }
        # Self-reported claims affirm nothing. A quote by a TPM of the policy affirms which machine it is, no more.
        vector = {"instance-identity": 2} if "attestation.tpm_keys" in self.applied else {}
        vector |= dict(
            VECTOR[section] for failure in self.failures if (section := failure.rule.split(".")[0]) in VECTOR
        )
        if vector:
            submodule["ear.trustworthiness-vector"] = vector
        result = {
            "eat_profile": PROFILE,
            "iat": int(self.time),
            "ear.verifier-id": {"developer": "wgpu-lora", "build": f"wgpu-lora {version('wgpu-lora')}"},
            "submods": {"wgpu-lora": submodule},
        }
        return result | ({"eat_nonce": self.nonce} if self.nonce is not None else {})


def appraise(
    evidence: Evidence, policy: Policy, *, nonce: str | None, now: float | None, head: tuple[int, str] | None = None
) -> Appraisal:
    """Check evidence against all rules of a policy.

    Args:
        evidence: as `read_evidence` returns it, which verified its signature and its quote.
        nonce: the one that was issued for it. None: not known, which the result says; never release a key then.
        now: the verifier's clock, in Unix seconds. None: of evidence that was fresh when its key was released.
        head: (sequence, SHA-256) of the newest entry of the job's evidence log that the verifier knows. The evidence
            must state the same entry, or a later one, so that a run is not resumed from an older state.

    Returns:
        The result, which passes only if no rule failed.
    """
    pins = {canonicalize_name(name) for name in policy["dependencies.pinned"] or ()}
    facts = {**evidence.claims, "quote": evidence.quote, "pins": pins}
    oldest, skew = policy["nonce.seconds"], policy["nonce.skew"]
    checks: Checks = [
        (KEYS, "the keys that signed it", partial(_keys, evidence)),
        (NONCE, f"the nonce {value_text(nonce)}", None if nonce is None else partial(_nonce, nonce)),
        (AGE, f"evidence of the last {oldest:g} s", None if now is None else partial(_time, now, oldest, math.inf)),
        (
            AHEAD,
            f"evidence from at most {skew:g} s ahead",
            None if now is None else partial(_time, now, math.inf, skew),
        ),
        (HEAD, "the newest known entry of the evidence log, or a later one", head and partial(_head, head)),
    ]
    for rule in RULES:
        assert rule.check
        value = policy[rule.name]
        expected = any_of(value) if isinstance(value, tuple | dict) else value_text(value)
        checks.append((rule.name, expected, None if value is None else partial(rule.check.failures, value)))
    return Appraisal(
        policy=policy.as_dict(),
        evidence_sha256=evidence.sha256,
        nonce=nonce,
        time=0.0 if now is None else now,
        level=str(evidence.claims.get("level"))[:40],
        failures=_failures(checks, facts),
        applied=[name for name, _, check in checks if check],
        not_applied=[name for name, _, check in checks if not check],
    )


def appraise_statement(statement: Mapping[str, Any], evidence: Evidence, policy: Policy, *, now: float) -> Appraisal:
    """Appraise the statement of a finished run: its session's evidence, and what the run did.

    Args:
        statement: whose signature by the evidence's key has been verified.
        evidence: of the session that signed it. Its age and its nonce are not checked: they were at the release.
        now: of the result.
    """
    session_appraisal = appraise(evidence, policy, nonce=None, now=None)
    facts = {"statement": statement["predicate"], "claims": evidence.claims, "run": _run(statement)}
    min_rows, max_steps = policy["training.min_rows"], policy["training.max_steps"]
    expected = "the run's"
    checks: Checks = [
        ("statement.materials", expected, _materials),
        ("statement.parameters", expected, _parameters),
        ("training.min_rows", expected, min_rows and partial(_rows, min_rows)),
        ("training.max_steps", expected, max_steps and partial(_steps, max_steps)),
    ]
    applied = [name for name, _, check in checks if check]
    return replace(
        session_appraisal,
        time=now,
        failures=[*session_appraisal.failures, *_failures(checks, facts)],
        applied=list(dict.fromkeys([*session_appraisal.applied, *applied])),
    )


def _failures(checks: Checks, facts: Facts) -> list[Failure]:
    return [
        Failure(name, *mismatch)
        for name, expected, check in checks
        if check
        for mismatch in failures_of(check, facts, expected)
    ]


def _keys(evidence: Evidence, facts: Facts) -> Iterator[Mismatch]:
    """The bound keys are stated, so that a later change of how they are found cannot unbind them."""
    for name, bound in (("recipient", evidence.recipient), ("signing", evidence.signing.pem)):
        if claim(facts, f"keys.{name}").strip() != bound.strip():
            yield f"the key that is bound, as keys.{name}", "another key"


def _nonce(nonce: str, facts: Facts) -> Iterator[Mismatch]:
    value = claim(facts, "eat_nonce")
    if not hmac.compare_digest(value.encode("utf-8", "surrogatepass"), nonce.encode()):
        yield f"the nonce {value_text(nonce)}", value_text(value)


def _time(now: float, behind: float, ahead: float, facts: Facts) -> Iterator[Mismatch]:
    """`iat` is at most these seconds behind and ahead of now."""
    iat: int = claim(facts, "iat", int)
    if not 0 <= iat < 1 << 40:  # the range of clocks, so that differences are finite
        raise ClaimError(f"{value_text(iat)}, which is no time")
    if now - iat > behind:
        yield f"evidence of the last {behind:g} s", f"evidence that is {now - iat:,.0f} s old"
    if iat - now > ahead:
        yield f"evidence from at most {ahead:g} s ahead", f"evidence from {iat - now:,.0f} s ahead"


def _head(head: tuple[int, str], facts: Facts) -> Iterator[Mismatch]:
    sequence, digest = claim(facts, "resume.sequence", int), claim(facts, "resume.head")
    if sequence < head[0] or (sequence == head[0] and digest != head[1]):
        yield (
            f"entry {head[0]} ({head[1][:12]}), or a later one",
            f"entry {value_text(sequence)} ({value_text(digest[:12])})",
        )


def _run(statement: Mapping[str, Any]) -> Any:
    """The facts of the run among the by-products; None if there are none."""
    products = claim_or_none(statement["predicate"], "runDetails.byproducts")
    matches = [product for product in products or () if isinstance(product, Mapping) and product.get("name") == RUN]
    return matches[0].get("annotations") if len(matches) == 1 else None


def _materials(facts: Facts) -> Iterator[Mismatch]:
    weights = claim_or_none(facts, "run.weights_sha256")
    if claim(facts, "statement.buildDefinition.resolvedDependencies", list) != materials(facts["claims"], weights):
        yield "the base, data, recipe and package of the evidence, and the weights of the run", "others"


def _parameters(facts: Facts) -> Iterator[Mismatch]:
    if claim(facts, "statement.buildDefinition.externalParameters", Mapping) != parameters(facts["claims"]):
        yield "the job, options and recipients of the evidence", "others"


def _rows(minimum: int, facts: Facts) -> Iterator[Mismatch]:
    if (rows := claim(facts, "run.rows", int)) < minimum:
        yield f"at least {minimum:,} rows trained", f"{rows:,}"


def _steps(maximum: int, facts: Facts) -> Iterator[Mismatch]:
    if not 0 < (steps := claim(facts, "run.steps", int)) <= maximum:
        yield f"at most {maximum:,} steps done", f"{steps:,}"


# -- files: `protect verify` -------------------------------------------------------------------------------------------


def verify(path: Path, policy: Policy, nonce: str | None, now: float) -> tuple[Appraisal, str]:
    """Appraise a file of evidence, or a finished run's statement.json with the evidence of its session beside it.

    Args:
        nonce: the one that was issued; None checks no nonce. now: Unix time; a statement has no freshness to check.

    Returns:
        The result, and what was appraised, with the name of its job.

    Raises:
        UserError: the file cannot be read, is neither of the two, or its signature does not fit; or no evidence beside
            a statement binds the key that signed it.
    """
    data = read_bytes(path, dsse.MAX_BYTES)
    try:
        kind = dsse.peek(data)["predicateType"]
    except UserError as error:
        raise UserError(
            f"{path} is neither evidence nor a run's statement ({error.problem}): check the path."
        ) from None
    if kind != KIND:
        evidence = claims.read_evidence(data)
        return appraise(evidence, policy, nonce=nonce, now=now), _subject("session", evidence)
    if nonce is not None:
        raise UserError(f"{path} is the statement of a finished run, which has no nonce: leave --nonce out.")
    problem = "there is none"
    for evidence_file in islice(sorted(path.parent.glob(EVIDENCE)), MOST_SESSIONS):
        evidence = claims.load_evidence(evidence_file)
        try:
            statement = dsse.verify(data, evidence.signing)
        except UserError as error:
            problem = error.problem
            continue
        result = appraise_statement(statement, evidence, policy, now=now)
        return result, _subject("statement of a finished run", evidence)
    raise UserError(
        f"{path} is not signed by a session whose {EVIDENCE} is beside it ({problem}): get the run's files."
    )


def _subject(label: str, evidence: Evidence) -> str:
    name = claim_or_none(evidence.claims, "job.name")
    return label if name is None else f"{label} of the job {value_text(name)}"
