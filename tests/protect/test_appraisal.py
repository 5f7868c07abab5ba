"""Every rule of a policy: evidence that differs only in what a rule checks fails with exactly this rule named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policies import (
    ALL_RULES,
    GIVEN,
    JSON,
    LEAST,
    NONCE,
    NOW,
    OWNER,
    Given,
    Signing,
    digest,
    public_pem,
    recipient,
)

from wgpu_lora.protect.policies.appraisal import appraise
from wgpu_lora.protect.policies.policy import KINDS, SETTINGS, Policy
from wgpu_lora.protect.policies.result import Appraisal
from wgpu_lora.protect.policies.rules import RULES

STRICT, LEAST_STRICT = Policy.parse(ALL_RULES.encode()), Policy.parse(LEAST.encode())
HEAD = (9, digest("head"))
EXTRA = {"name": "extra", "sha256": digest("extra"), "intact": True}

# Rule -> the claim that it checks, and values with which it fails. `...` is a missing claim.
ATTACKS: dict[str, list[tuple[str, Any]]] = {
    "evidence.keys": [("keys.recipient", recipient()), ("keys.signing", public_pem()), ("keys.recipient", ...)],
    "evidence.nonce": [("eat_nonce", NONCE[:-1] + "1"), ("eat_nonce", ""), ("eat_nonce", ...), ("eat_nonce", [NONCE])],
    "nonce.seconds": [("iat", NOW - 301), ("iat", 0)],
    "nonce.skew": [("iat", NOW + 6), ("iat", NOW + 10**9)],
    "evidence.resume": [
        ("resume.sequence", 8),
        ("resume.sequence", -1),
        ("resume.sequence", float("nan")),
        ("resume.head", digest("other")),
        ("resume", ...),
    ],
    "attestation.level": [("level", "self-reported"), ("level", "QUOTED"), ("level", ...), ("level", True)],
    "attestation.tpm_keys": [("quote.key_pem", public_pem()), ("quote.key_pem", "key"), ("quote.key_pem", ...)],
    "attestation.pcrs": [("quote.pcrs", {0: digest("pcr0")}), ("quote.pcrs", {0: digest("pcr0"), 7: digest("x")})],
    "data.sha256": [
        ("job.data.0.sha256", digest("swapped")),
        ("job.data.1.sha256", digest("swapped")),
        ("job.data.0.sha256", digest("train").upper()),
        ("job.data.0.sha256", ...),
    ],
    "release.recipients": [("job.recipients", [OWNER, recipient()]), ("job.recipients", []), ("job.recipients", ...)],
    "job.names": [("job.name", "ward-8"), ("job.name", "ward-7 "), ("job.name", ...)],
    "job.sha256": [("job.sha256", digest("other job")), ("job.sha256", ...)],
    "base.sha256": [("base.sha256", digest("other base")), ("base.sha256", ...)],
    "base.config_sha256": [("base.config_sha256", digest("other config")), ("base.config_sha256", ...)],
    "recipe.sha256": [("job.recipe_sha256", digest("other recipe")), ("job.recipe_sha256", ...)],
    "recipe.options": [
        ("job.options.learning_rate", 2e-3),
        ("job.options.learning_rate", -2e-4),
        ("job.options.learning_rate", float("nan")),
        ("job.options.learning_rate", float("inf")),
        ("job.options.learning_rate", "2e-4"),
        ("job.options.learning_rate", 10**5000),
        ("job.options.learning_rate", ...),
        ("job.options.objective", "dpo"),
        ("job.options.packing", 1),
        ("job.options.packing", None),
    ],
    "training.min_rows": [
        ("job.data.0.rows", 799),
        ("job.data.0.rows", -(10**30)),
        ("job.data.0.rows", 1e400),
        ("job.data.0.rows", "800"),
        ("job.data.0.rows", True),
        ("job.data.0.rows", ...),
    ],
    "training.max_steps": [
        ("job.options.max_steps", 101),
        ("job.options.max_steps", 0),
        ("job.options.max_steps", -1),
        ("job.options.max_steps", 10**5000),
        ("job.options.max_steps", float("nan")),
        ("job.options.max_steps", None),
        ("job.options.max_steps", ...),
    ],
    "package.versions": [
        ("package.version", v) for v in ("0.6.0", "0.4.9", "5", "newest", "", ..., 0.5, "1" * 5000, "0.5" * 10**5)
    ],
    "package.sha256": [("package.sha256", digest("changed")), ("package.sha256", ...)],
    "wgpu.versions": [("wgpu.version", "0.33.0"), ("wgpu.version", ...)],
    "wgpu.native_versions": [("wgpu.native_version", "26.0.1.0"), ("wgpu.native_version", ...)],
    "wgpu.native_sha256": [("wgpu.native_sha256", digest("changed")), ("wgpu.native_sha256", ...)],
    "python.versions": [("python.version", "3.13.0"), ("python.version", ...)],
    "python.implementations": [("python.implementation", "PyPy"), ("python.implementation", ...)],
    "python.sha256": [("python.sha256", digest("changed")), ("python.sha256", ...)],
    "python.library_sha256": [("python.library_sha256", digest("changed")), ("python.library_sha256", ...)],
    "host.no_core_dumps": [("host.core_dumps.off", False), ("host.core_dumps", ...)],
    "host.no_swap": [("host.swap", ["/swapfile"]), ("host.swap", ...), ("host.swap", None), ("host.memory", ...)],
    "process.untraced": [("process.traced", True), ("process.traced", 0), ("process.traced", ...)],
    "process.compiled": [("process.compiled_otherwise", ["/a.py"]), ("process.compiled_otherwise", ...)],
    "process.import_hooks": [("process.import_hooks", ["_EditableFinder", "Evil"]), ("process.import_hooks", ...)],
    "process.unlisted": [("process.unlisted", {"/opt/here.pth": digest("x")}), ("process.unlisted", ...)],
    "process.libraries": [("process.libraries", {"/a.so": digest("pth")}), ("process.libraries", {"/a.so": 1})],
    "dependencies.intact": [
        ("dependencies.numpy.intact", False),
        ("dependencies.numpy.intact", 1),
        ("dependencies.numpy.intact", ...),
    ],
    "dependencies.only_pinned": [("dependencies.extra", EXTRA)],
    "dependencies.pinned": [("dependencies.numpy.sha256", digest("changed")), ("dependencies.numpy", ...)],
    "device.names": [
        ("device.name", "NVIDIA GeForce RTX 3090"),
        ("device.name", "nvidia geforce rtx 4090"),
        ("device.name", "NVIDIA GeForce RTX 4090 "),
        ("device.name", "NVIDIA GeForce RТX 4090"),  # a Cyrillic Te
        ("device.name", "NVIDIA GeForce RTX 40９0"),  # a fullwidth digit, which no ? stands for
        ("device.name", "NVIDIA GeForce RTX 40\n0"),
        ("device.name", ...),
        ("device.name", ["NVIDIA GeForce RTX 4090"]),
    ],
    "device.backends": [("device.backend", "OpenGL"), ("device.backend", ...)],
    "device.kinds": [("device.kind", "software"), ("device.kind", ...)],
    "device.drivers": [("device.driver", "570.1"), ("device.driver", "580.\u202e1"), ("device.driver", ...)],
    "kernel.systems": [("kernel.system", "Windows"), ("kernel.system", ...)],
    "kernel.releases": [("kernel.release", "6.9.0"), ("kernel.release", ...)],
    "kernel.machines": [("kernel.machine", "aarch64"), ("kernel.machine", ...)],
    "environment.forbidden": [("environment.LD_PRELOAD", digest("preload"))],
    "environment.only": [("environment.VK_ICD_FILENAMES", digest("x")), ("environment.WGPU_LORA_CHECKED", digest("1"))],
}
# A claim that several rules check: without it, or with another type, all of them fail.
SHARED = {
    "iat": {"nonce.seconds", "nonce.skew"},
    "quote": {"attestation.level", "attestation.tpm_keys", "attestation.pcrs"},
    "base": {"base.sha256", "base.config_sha256"},
    "job.data": {"data.sha256", "training.min_rows"},
    "job.options": {"recipe.options", "training.max_steps"},
    "dependencies": {"dependencies.intact", "dependencies.only_pinned", "dependencies.pinned"},
    "environment": {"environment.forbidden", "environment.only"},
    "host": {"host.no_core_dumps", "host.no_swap"},
    "process": {f"process.{key}" for key in ("untraced", "compiled", "import_hooks", "unlisted", "libraries")},
}


def of(evidence: Given, policy: Policy = STRICT, **other: Any) -> Appraisal:
    return appraise(evidence, policy, **({"nonce": NONCE, "now": NOW, "head": HEAD} | other))


def failed(evidence: Given, policy: Policy = STRICT, **other: Any) -> set[str]:
    found = of(evidence, policy, **other)
    assert found.passed == (not found.failures)
    for failure in found.failures:
        assert failure.expected
        assert failure.found
        assert failure.line().isprintable()
    json.loads(json.dumps(found.to_json(), allow_nan=False))
    return {failure.rule for failure in found.failures}


def test_what_a_policy_accepts_passes() -> None:
    found = of(GIVEN)
    assert found.failures == []
    assert found.passed
    assert found.not_applied == []


def test_every_rule_is_attacked() -> None:
    always = {"evidence.keys", "evidence.nonce", "evidence.resume", "nonce.seconds", "nonce.skew"}
    assert set(ATTACKS) == {rule.name for rule in RULES} | always
    # Each key of the schema is a rule or a setting, and the policy of these tests has them all.
    assert set(KINDS) == {(rule.section, rule.key) for rule in RULES} | set(SETTINGS)
    assert set(STRICT.values) == set(KINDS)


@pytest.mark.parametrize("rule", ATTACKS)
def test_an_attack_fails_with_exactly_its_rule(rule: str) -> None:
    for path, value in ATTACKS[rule]:
        assert failed(GIVEN.changed(path, value)) == {rule}, path


@pytest.mark.parametrize("path", SHARED)
@pytest.mark.parametrize("value", [..., None, 7, "text", [], [1], True, float("nan")])
def test_a_missing_or_mistyped_claim_fails_all_rules_on_it(path: str, value: Any) -> None:
    if (path, value) == ("iat", 7):
        value = -7
    if path == "quote" and value is not ... and value is not None:
        value = {}  # read_evidence gives an object or None
    assert failed(GIVEN.changed(path, value)) == SHARED[path]


def test_without_claims_every_rule_fails() -> None:
    nothing = failed(replace(GIVEN, claims={}, quote=None))
    assert nothing == set(ATTACKS)


def test_the_keys_that_signed_are_those_stated() -> None:
    assert failed(replace(GIVEN, recipient=recipient())) == {"evidence.keys"}
    assert failed(replace(GIVEN, signing=Signing(public_pem()))) == {"evidence.keys"}


def test_evidence_is_used_once_and_in_time() -> None:
    assert failed(GIVEN, nonce="another nonce") == {"evidence.nonce"}
    assert failed(GIVEN, now=NOW + 1000) == {"nonce.seconds"}
    assert failed(GIVEN, now=NOW - 1000) == {"nonce.skew"}  # the verifier's clock was set back
    assert failed(GIVEN, now=NOW + 297) == set()
    assert failed(GIVEN, now=NOW - 6) == set()


def test_a_later_entry_of_the_log_is_accepted_and_an_older_is_not() -> None:
    assert failed(GIVEN, head=(8, digest("older"))) == set()
    assert failed(GIVEN, head=(10, digest("newer"))) == {"evidence.resume"}
    first = GIVEN.changed("resume", ...)
    assert failed(first, head=None) == set()
    assert "evidence.resume" in of(first, head=None).not_applied


def test_a_stricter_version_refuses_what_an_earlier_one_accepted() -> None:
    stricter = Policy.parse(ALL_RULES.replace("version = 3", "version = 4").replace("40?0", "4080").encode())
    assert failed(GIVEN, stricter) == {"device.names"}
    assert (stricter.version, STRICT.version) == (4, 3)
    assert stricter.sha256 != STRICT.sha256


def test_what_is_not_restricted_is_said() -> None:
    found = of(GIVEN.changed("level", "self-reported"), LEAST_STRICT, nonce=None, head=None)
    assert found.passed
    required = {rule.name for rule in RULES if rule.required}
    assert set(found.applied) == required | {"evidence.keys", "nonce.seconds", "nonce.skew"}
    assert set(found.not_applied) == set(ATTACKS) - set(found.applied)
    assert found.to_json()["submods"]["wgpu-lora"]["ear.wgpu-lora.not-applied"] == found.not_applied


def test_locked_memory_needs_no_machine_without_swap() -> None:
    assert failed(GIVEN.changed("host.swap", ["/swapfile"]).changed("host.memory.locked", "all")) == set()


def test_several_failures_are_all_named() -> None:
    evidence = GIVEN.changed("device.kind", "software").changed("kernel.machine", "mips").changed("dependencies", {})
    assert failed(evidence) == {"device.kinds", "kernel.machines", *SHARED["dependencies"]}


def test_claims_of_great_size_take_no_time_and_no_space() -> None:
    many = {f"LD_{i}": digest(1) for i in range(9_000)}
    found = of(GIVEN.changed("environment", many))
    assert {failure.rule for failure in found.failures} == SHARED["environment"]
    assert len(found.failures) == 2 * 21
    assert found.failures[20].found == "more like these"
    for path, value in (("environment", {str(i): "" for i in range(10**5)}), ("job.recipients", [OWNER] * 10**5)):
        found = of(GIVEN.changed(path, value))
        assert {failure.rule for failure in found.failures} == SHARED.get(path, {"release.recipients"})
        assert "more than 10,000 entries" in found.failures[0].found
    assert failed(GIVEN.changed("device.name", "NVIDIA GeForce RTX 40" + "9" * 10**6 + "0")) == {"device.names"}


def test_a_file_for_each_purpose() -> None:
    two = [{"role": "data", "sha256": digest("train"), "rows": 400}] * 2
    assert failed(GIVEN.changed("job.data", two)) == SHARED["job.data"]


def test_one_package_under_two_spellings_is_unfit() -> None:
    evidence = GIVEN.changed("dependencies.Ml_Dtypes", {"sha256": digest("ml-dtypes"), "intact": True})
    assert failed(evidence) == SHARED["dependencies"]


def test_a_quote_beside_claims_that_deny_it() -> None:
    """A policy that takes self-reported claims takes quoted ones, but no level of another name."""
    assert failed(GIVEN, LEAST_STRICT) == set()
    assert failed(replace(GIVEN, quote=None), LEAST_STRICT) == set()
    assert failed(GIVEN.changed("level", "certified"), LEAST_STRICT) == {"attestation.level"}


def test_a_quote_among_the_claims_is_none() -> None:
    claims = {**GIVEN.claims, "quote": GIVEN.quote, "pins": ["numpy", "ml-dtypes", "extra"]}
    assert failed(replace(GIVEN, claims=claims, quote=None)) == SHARED["quote"]
    claims["dependencies"] = {**claims["dependencies"], "extra": EXTRA}
    assert failed(replace(GIVEN, claims=claims)) == {"dependencies.only_pinned"}


def test_the_result_affirms_only_what_a_quote_shows() -> None:
    def made(evidence: Given, policy: Policy = STRICT) -> dict[str, Any]:
        return of(evidence, policy).to_json()["submods"]["wgpu-lora"]

    vector = "ear.trustworthiness-vector"
    assert made(GIVEN)["ear.status"] == "affirming"
    assert made(GIVEN)[vector] == {"instance-identity": 2}
    assert vector not in made(GIVEN, LEAST_STRICT)
    wrong = made(GIVEN.changed("quote.key_pem", public_pem()).changed("package.sha256", digest("x")))
    assert wrong["ear.status"] == "contraindicated"
    assert wrong[vector] == {"instance-identity": 97, "executables": 33}
    assert [failure["rule"] for failure in wrong["ear.wgpu-lora.failures"]] == [
        "attestation.tpm_keys",
        "package.sha256",
    ]


PATHS = sorted({path for cases in ATTACKS.values() for path, _ in cases} - {"dependencies.extra"})


@settings(max_examples=60, deadline=None)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_no_claim_raises_whatever_it_is(path: str, value: Any) -> None:
    failed(GIVEN.changed(path, value))
