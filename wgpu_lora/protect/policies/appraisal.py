"""The appraisal of evidence by a policy (RATS, RFC 9334): a pure function that names every rule that failed."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from wgpu_lora.protect.policies.claim_checks import ClaimError, Facts, Failed, claim
from wgpu_lora.protect.policies.fields import shown
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.policies.result import Appraisal, Failure
from wgpu_lora.protect.policies.rules import RULES

# What is checked whatever the policy says; seconds are its own.
KEYS, NONCE, AGE, AHEAD, HEAD = "evidence.keys", "evidence.nonce", "nonce.seconds", "nonce.skew", "evidence.resume"
MOST_FAILURES = 20  # of a rule: claims of ten thousand wrong variables need no line for each
Check = Callable[[Facts], Iterator[Failed]]


class Key(Protocol):
    @property
    def pem(self) -> str: ...
    @property
    def keyid(self) -> str: ...


class Evidence(Protocol):
    """Evidence whose signature, by the key that it binds, and whose quote have been verified (`claims.Evidence`)."""

    @property
    def claims(self) -> Mapping[str, Any]: ...
    @property
    def recipient(self) -> str: ...
    @property
    def signing(self) -> Key: ...
    @property
    def sha256(self) -> str: ...
    @property
    def quote(self) -> Mapping[str, Any] | None: ...


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
    facts = {
        **evidence.claims,
        "quote": evidence.quote,
        "pins": policy.values.get(("dependencies", "pinned"), ()),
    }
    oldest, skew = policy.nonce_seconds, policy.skew_seconds
    checks: list[tuple[str, str, Check | None]] = [
        (KEYS, "the keys that signed it", partial(_keys, evidence)),
        (NONCE, f"the nonce {shown(nonce)}", None if nonce is None else partial(_nonce, nonce)),
        (AGE, f"evidence of the last {oldest:g} s", None if now is None else partial(_age, oldest, now)),
        (AHEAD, f"evidence from at most {skew:g} s ahead", None if now is None else partial(_ahead, skew, now)),
        (HEAD, "the newest known entry of the evidence log, or a later one", head and partial(_head, head)),
    ]
    for rule in RULES:
        value = policy.values.get((rule.section, rule.key))
        expected = "" if value is None else rule.field.show(value)
        checks.append((rule.name, expected, None if value is None else partial(rule.failures, value)))
    failures = [
        Failure(name, *failed)
        for name, expected, check in checks
        if check is not None
        for failed in failures_of(check, facts, expected)
    ]
    return Appraisal(
        policy=policy.as_dict(),
        evidence_sha256=evidence.sha256,
        nonce=nonce,
        time=0.0 if now is None else now,
        level=str(evidence.claims.get("level"))[:40],
        failures=failures,
        applied=[name for name, _, check in checks if check is not None],
        not_applied=[name for name, _, check in checks if check is None],
    )


def failures_of(check: Check, facts: Facts, expected: str) -> Iterator[Failed]:
    """A check's failures, at most `MOST_FAILURES`; a claim that it cannot use is one."""
    try:
        for number, failed in enumerate(check(facts)):
            if number == MOST_FAILURES:
                yield failed[0], "more like these"
                return
            yield failed
    except ClaimError as unfit:
        yield expected, str(unfit)


def _keys(evidence: Evidence, facts: Facts) -> Iterator[Failed]:
    """The bound keys are stated, so that a later change of how they are found cannot unbind them."""
    for name, bound in (("recipient", evidence.recipient), ("signing", evidence.signing.pem)):
        if claim(facts, f"keys.{name}").strip() != bound.strip():
            yield f"the key that is bound, as keys.{name}", "another key"


def _nonce(nonce: str, facts: Facts) -> Iterator[Failed]:
    found = claim(facts, "eat_nonce")
    if not hmac.compare_digest(found.encode("utf-8", "surrogatepass"), nonce.encode()):
        yield f"the nonce {shown(nonce)}", shown(found)


def _age(seconds: float, now: float, facts: Facts) -> Iterator[Failed]:
    if now - (found := _issued(facts)) > seconds:
        yield f"evidence of the last {seconds:g} s", f"evidence that is {now - found:,.0f} s old"


def _ahead(seconds: float, now: float, facts: Facts) -> Iterator[Failed]:
    if (found := _issued(facts)) - now > seconds:
        yield f"evidence from at most {seconds:g} s ahead", f"evidence from {found - now:,.0f} s ahead"


def _issued(facts: Facts) -> int:
    """`iat`, within the range of clocks, so that differences are finite."""
    found: int = claim(facts, "iat", int)
    if not 0 <= found < 1 << 40:
        raise ClaimError(f"{shown(found)}, which is no time")
    return found


def _head(head: tuple[int, str], facts: Facts) -> Iterator[Failed]:
    sequence, digest = claim(facts, "resume.sequence", int), claim(facts, "resume.head")
    if sequence < head[0] or (sequence == head[0] and digest != head[1]):
        yield f"entry {head[0]} ({head[1][:12]}), or a later one", f"entry {shown(sequence)} ({shown(digest[:12])})"
