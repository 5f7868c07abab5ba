"""Policies: what is refused; which claim fails which rule; and policies that are made from claims."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import FIXTURES
from support.protect.policies import (
    ALL_RULES,
    GIVEN,
    JSON,
    LEAST,
    NONCE,
    NOW,
    OWNER,
    TPM,
    Given,
    digest,
    public_pem,
    recipient,
)  # fmt: skip

from wgpu_lora.errors import UserError
from wgpu_lora.protect.attestation import tpm
from wgpu_lora.protect.policies.appraisal import Appraisal, appraise
from wgpu_lora.protect.policies.claim_checks import LONGEST, matches, value_text
from wgpu_lora.protect.policies.policy import KEYS, RULES, Policy
from wgpu_lora.protect.policies.policy_template import policy_for, toml
from wgpu_lora.protect.sealed.keys import PublicKey

STRICT, LEAST_STRICT = Policy.parse(ALL_RULES.encode()), Policy.parse(LEAST.encode())
HEAD = (9, digest("head"))
EXTRA = {"name": "extra", "sha256": digest("extra"), "intact": True}

# -- the file ----------------------------------------------------------------------------------------------------------


def refused(text: str) -> str:
    with pytest.raises(UserError) as caught:
        Policy.parse(text.encode(), "The policy p.toml")
    (sentence,) = caught.value.lines
    assert sentence.startswith("The policy p.toml")
    assert len(sentence) < 500
    assert sentence.isprintable()
    return sentence


REFUSED = [
    ("[devices]\nnames = ['x']", "'devices' is not known: did you mean 'device'?"),
    ("[device]\nname = ['x']", "'device.name' is not known: did you mean 'names'?"),
    ("[device]\n'\\u202enames' = ['x']", "'device.\\u202enames' is not known: use names, backends"),
    ("[device]\nnames = 'x'", "'device.names' must be a list, not"),
    ("[device]\nnames = []", "'device.names' must be a list with at least one value"),
    ("[device]\nnames = [1]", "'device.names[0]' must be text"),
    ("[device]\nkinds = ['']", "'device.kinds[0]' must be text that is not empty"),
    ("[[device]]\nnames = ['x']", "'device' must be an object"),
    ("[base]\nsha256 = ['abc']", "64 lower-case hexadecimal"),
    (f"[base]\nsha256 = ['{digest('x').upper()}']", "64 lower-case hexadecimal"),
    ("[package]\nversions = 'newest'", "version specifier"),
    ("[training]\nmax_steps = 0", "'training.max_steps' must be at least 1"),
    ("[training]\nmin_rows = true", "whole number"),
    ("[nonce]\nseconds = nan", "finite number"),
    ("[nonce]\nseconds = 0", "between 1 and 86,400 seconds"),
    ("[nonce]\nskew = -1", "between 0 and 300 seconds"),
    ("[dependencies]\nintact = false", "must be true, or left out"),
    ("[dependencies]\nonly_pinned = true", "no [dependencies.pinned]"),
    (f"[dependencies.pinned]\na_b = '{digest(1)}'\nA-B = '{digest(2)}'", "twice"),
    ("[environment.only]\nPATH = 'x'", "64 lower-case hexadecimal"),
    ("[recipe.options]\nlearning_rat = 1", "no option 'learning_rat': did you mean 'learning_rate'?"),
    ("[recipe.options]\nlearning_rate = { most = 1 }", "most' is not known: use min, max and allow"),
    ("[recipe.options]\nlearning_rate = {}", "min, max or allow"),
    ("[recipe.options]\nlearning_rate = { max = nan }", "finite number"),
    ("[recipe.options]\nobjective = { allow = [] }", "at least one value"),
    ("[recipe.options]\nobjective = [['sft']]", "must be an object, text, true or false or a number"),
    ("[data]\nsha256 = []", "not valid TOML"),
]
CHANGED = [
    (LEAST, '"self-reported"', '"quoted"', "add 'tpm_keys'"),
    (LEAST, '"self-reported"', '"trusted"', "must be 'self-reported' or 'quoted', not"),
    (LEAST, '"self-reported"', f"\"self-reported\"\ntpm_keys = ['''{TPM}''']", 'needs level = "quoted"'),
    (ALL_RULES, "{ 0 =", "{ 24 =", "from 0 to 23"),
    (ALL_RULES, "BEGIN PUBLIC", "BEGIN PRIVATE", "public key in PEM"),
    (LEAST, OWNER, OWNER[:-1] + ("q" if OWNER[-1] != "q" else "p"), "must be an age recipient"),
    (LEAST, "version = 1", "version = '1'", "whole number"),
    (LEAST, "version = 1", "version = 99999999999999999999", "64 bits"),
    *((LEAST, f"\n{line} = ", "\n# ", f"'{key}' is missing: add it") for line, key in (
        ("name", "policy.name"), ("version", "policy.version"), ("recipients", "release.recipients"),
        ("level", "attestation.level"), ("sha256", "data.sha256"),
    )),
    (LEAST, LEAST, "", "'policy' is missing: add it"),
]  # fmt: skip


def test_refused() -> None:
    for more, words in REFUSED:
        assert words in refused(f"{LEAST}{more}"), more
    for text, old, new, words in CHANGED:
        assert old in text
        assert words in refused(text.replace(old, new)), new


def test_values_and_defaults(tmp_path: Path) -> None:
    assert (LEAST_STRICT["nonce.seconds"], LEAST_STRICT["nonce.skew"], LEAST_STRICT["release.seconds"]) == (
        300,
        5,
        3600,
    )
    assert (LEAST_STRICT["training.min_rows"], STRICT["training.min_rows"]) == (None, 800)
    assert STRICT.as_dict() == {"name": "ward", "version": 3, "sha256": STRICT.sha256}
    path = tmp_path / "policy.toml"
    path.write_text(LEAST)
    assert Policy.read(path) == LEAST_STRICT
    path.write_bytes(LEAST.encode() + b"#" * (10 << 20))
    with pytest.raises(UserError, match="is longer than"):
        Policy.read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not valid TOML"):
        Policy.read(path)
    for missing in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(UserError, match="cannot be read"):
            Policy.read(missing)


TOML = st.recursive(
    st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(key=st.sampled_from([key.name for key in KEYS]), value=TOML)
def test_no_value_raises_anything_else(key: str, value: object) -> None:
    try:
        text = f"{LEAST}\n{key} = {toml(value)}"
    except (TypeError, ValueError):
        return
    message = ""
    try:
        Policy.parse(text.encode("utf-8", "replace"))
    except UserError as error:
        message = str(error)
    assert message.isprintable()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: (LEAST + text).encode("utf-8", "replace")))
def test_hostile_bytes(data: bytes) -> None:
    message = ""
    try:
        Policy.parse(data)
    except UserError as error:
        message = str(error)
    assert message.isprintable()


def test_wildcards_and_values_in_messages() -> None:
    for text, pattern, fits in (
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100*", True),
        ("NVIDIA A100", "NVIDIA A100*", True),
        ("xNVIDIA A100", "NVIDIA A100*", False),
        ("Apple M3 Max", "apple m3 max", False),
        ("Apple\u00a0M3", "Apple*M3", False),
        ("Apple M3\u200b", "Apple M3*", False),
        ("ΑMD", "*MD", False),  # a Greek Alpha
        ("Größe", "Gr*e", False),
        ("Größe", "Größ*", True),
        ("a" * 5000 + "b", "a*" * 30 + "c", False),  # in time
    ):
        assert matches(text, pattern) == fits, text
    for value in ("a" * 1000, 10**5000, "\x1b[31m\n", float("nan"), {"a": ["\u202e"]}, None):
        assert value_text(value).isprintable()
        assert len(value_text(value)) <= LONGEST


def test_the_page_on_policies() -> None:
    """Its example is a policy, and its table has every key."""
    page = (Path(__file__).parents[2] / "docs/protected-owners.md").read_text()
    policy = Policy.parse(page.partition("```toml\n")[2].partition("```")[0].encode())
    assert (policy["policy.name"], policy["training.min_rows"], policy["training.max_steps"]) == ("ward-7", 500, 2000)
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `") and "." in line.split("|")[1]]
    assert sorted(name for row in rows for name in row.split("`")[1::2]) == sorted(key.name for key in KEYS)
    for key in KEYS:
        assert not key.required or f"`{key.name}`" in page.partition("are required.")[0]


# -- rules -------------------------------------------------------------------------------------------------------------

# Rule -> the claim that it checks, and values with which it fails. `...` is a missing claim.
ATTACKS: dict[str, list[tuple[str, list[Any]]]] = {
    "evidence.keys": [("keys.recipient", [recipient(), ...]), ("keys.signing", [public_pem()])],
    "evidence.nonce": [("eat_nonce", [NONCE[:-1] + "1", "", ..., [NONCE]])],
    "nonce.seconds": [("iat", [NOW - 301, 0])],
    "nonce.skew": [("iat", [NOW + 6, NOW + 10**9])],
    "evidence.resume": [
        ("resume.sequence", [8, -1, float("nan")]), ("resume.head", [digest("other")]), ("resume", [...]),
    ],
    "attestation.level": [("level", ["self-reported", "QUOTED", ..., True])],
    "attestation.tpm_keys": [("quote.key_pem", [public_pem(), "key", ...])],
    "attestation.pcrs": [("quote.pcrs", [{0: digest("pcr0")}, {0: digest("pcr0"), 7: digest("x")}])],
    "data.sha256": [
        ("job.data.0.sha256", [digest("swapped"), digest("train").upper(), ...]),
        ("job.data.1.sha256", [digest("swapped")]),
    ],
    "release.recipients": [("job.recipients", [[OWNER, recipient()], [], ...])],
    "job.names": [("job.name", ["ward-8", "ward-7 ", ...])],
    "job.sha256": [("job.sha256", [digest("other job"), ...])],
    "base.sha256": [("base.sha256", [digest("other base"), ...])],
    "base.config_sha256": [("base.config_sha256", [digest("other config"), ...])],
    "recipe.sha256": [("job.recipe_sha256", [digest("other recipe"), ...])],
    "recipe.options": [
        ("job.options.learning_rate", [2e-3, -2e-4, float("nan"), float("inf"), "2e-4", 10**5000, ...]),
        ("job.options.objective", ["dpo"]),
        ("job.options.packing", [1, None]),
    ],
    "training.min_rows": [("job.data.0.rows", [799, -(10**30), 1e400, "800", True, ...])],
    "training.max_steps": [("job.options.max_steps", [101, 0, -1, 10**5000, float("nan"), None, ...])],
    "package.versions": [
        ("package.version", ["0.6.0", "0.4.9", "5", "newest", "", ..., 0.5, "1" * 5000, "0.5" * 10**5])
    ],
    "package.sha256": [("package.sha256", [digest("changed"), ...])],
    "wgpu.versions": [("wgpu.version", ["0.33.0", ...])],
    "wgpu.native_versions": [("wgpu.native_version", ["26.0.1.0", ...])],
    "wgpu.native_sha256": [("wgpu.native_sha256", [digest("changed"), ...])],
    "python.versions": [("python.version", ["3.13.0", ...])],
    "python.implementations": [("python.implementation", ["PyPy", ...])],
    "python.sha256": [("python.sha256", [digest("changed"), ...])],
    "python.library_sha256": [("python.library_sha256", [digest("changed"), ...])],
    "host.no_core_dumps": [("host.core_dumps.off", [False]), ("host.core_dumps", [...])],
    "host.no_swap": [("host.swap", [["/swapfile"], ..., None]), ("host.memory", [...])],
    "process.untraced": [("process.traced", [True, 0, ...])],
    "process.compiled": [("process.compiled_otherwise", [["/a.py"], ...])],
    "process.import_hooks": [("process.import_hooks", [["_EditableFinder", "Evil"], ...])],
    "process.unlisted": [("process.unlisted", [{"/opt/here.pth": digest("x")}, ...])],
    "process.libraries": [("process.libraries", [{"/a.so": digest("pth")}, {"/a.so": 1}])],
    "dependencies.intact": [("dependencies.numpy.intact", [False, 1, ...])],
    "dependencies.only_pinned": [("dependencies.extra", [EXTRA])],
    "dependencies.pinned": [("dependencies.numpy.sha256", [digest("changed")]), ("dependencies.numpy", [...])],
    "device.names": [
        ("device.name", [
            "NVIDIA GeForce RTX 3090", "nvidia geforce rtx 4090", "NVIDIA GeForce RTX 4090 ",
            "NVIDIA GeForce RТX 4090",  # a Cyrillic Te
            "NVIDIA GeForce RTX 40９0",  # a fullwidth digit, which no ? stands for
            "NVIDIA GeForce RTX 40\n0", ..., ["NVIDIA GeForce RTX 4090"],
        ])
    ],
    "device.backends": [("device.backend", ["OpenGL", ...])],
    "device.kinds": [("device.kind", ["software", ...])],
    "device.drivers": [("device.driver", ["570.1", "580.\u202e1", ...])],
    "kernel.systems": [("kernel.system", ["Windows", ...])],
    "kernel.releases": [("kernel.release", ["6.9.0", ...])],
    "kernel.machines": [("kernel.machine", ["aarch64", ...])],
    "environment.forbidden": [("environment.LD_PRELOAD", [digest("preload")])],
    "environment.only": [
        ("environment.VK_ICD_FILENAMES", [digest("x")]), ("environment.WGPU_LORA_CHECKED", [digest("1")]),
    ],
}  # fmt: skip
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
    result = of(evidence, policy, **other)
    assert result.passed == (not result.failures)
    for failure in result.failures:
        assert failure.expected
        assert failure.found
        assert failure.line().isprintable()
    json.loads(json.dumps(result.to_json(), allow_nan=False))
    return {failure.rule for failure in result.failures}


def test_every_rule_is_attacked_and_evidence_that_fits_passes() -> None:
    always = {"evidence.keys", "evidence.nonce", "evidence.resume", "nonce.seconds", "nonce.skew"}
    assert set(ATTACKS) == {rule.name for rule in RULES} | always
    assert all(STRICT[key.name] is not None for key in KEYS)
    assert (of(GIVEN).failures, of(GIVEN).not_applied) == ([], [])


@pytest.mark.parametrize("rule", ATTACKS)
def test_an_attack_fails_with_exactly_its_rule(rule: str) -> None:
    for path, values in ATTACKS[rule]:
        for value in values:
            assert failed(GIVEN.changed(path, value)) == {rule}, path


@pytest.mark.parametrize("path", SHARED)
def test_a_missing_or_mistyped_claim_fails_all_rules_on_it(path: str) -> None:
    for value in (..., None, -7, "text", [], [1], True, float("nan")):
        if path == "quote" and value is not ... and value is not None:
            value = {}  # read_evidence gives an object or None
        assert failed(GIVEN.changed(path, value)) == SHARED[path], value
    assert failed(replace(GIVEN, claims={}, quote=None)) == set(ATTACKS)


OTHERS: list[tuple[str, Given, dict[str, Any], set[str]]] = [
    ("another recipient signed", replace(GIVEN, recipient=recipient()), {}, {"evidence.keys"}),
    ("another key signed", replace(GIVEN, signing=PublicKey.parse(public_pem())), {}, {"evidence.keys"}),
    ("another nonce", GIVEN, {"nonce": "another nonce"}, {"evidence.nonce"}),
    ("old", GIVEN, {"now": NOW + 1000}, {"nonce.seconds"}),
    ("a clock that was set back", GIVEN, {"now": NOW - 1000}, {"nonce.skew"}),
    ("not too old", GIVEN, {"now": NOW + 297}, set()),
    ("not too new", GIVEN, {"now": NOW - 6}, set()),
    ("a later entry of the log", GIVEN, {"head": (8, digest("older"))}, set()),
    ("an older entry of the log", GIVEN, {"head": (10, digest("newer"))}, {"evidence.resume"}),
    ("a first session", GIVEN.changed("resume", ...), {"head": None}, set()),
    ("locked memory", GIVEN.changed("host.swap", ["/swapfile"]).changed("host.memory.locked", "all"), {}, set()),
    (
        "several",
        GIVEN.changed("device.kind", "software").changed("kernel.machine", "mips").changed("dependencies", {}),
        {}, {"device.kinds", "kernel.machines", *SHARED["dependencies"]},
    ),
    (
        "two files for a purpose",
        GIVEN.changed("job.data", [{"role": "data", "sha256": digest("train"), "rows": 400}] * 2),
        {}, SHARED["job.data"],
    ),
    (
        "a package in two spellings",
        GIVEN.changed("dependencies.Ml_Dtypes", {"sha256": digest("ml-dtypes"), "intact": True}),
        {}, SHARED["dependencies"],
    ),
    (
        "a quote among the claims",
        replace(GIVEN, claims={**GIVEN.claims, "quote": GIVEN.quote, "pins": ["numpy", "extra"]}, quote=None),
        {}, SHARED["quote"],
    ),
    (
        "pins among the claims",
        replace(GIVEN, claims={**GIVEN.claims, "pins": ["numpy", "extra"]}).changed("dependencies.extra", EXTRA),
        {}, {"dependencies.only_pinned"},
    ),
    ("no quote where none is asked", replace(GIVEN, quote=None), {"policy": LEAST_STRICT}, set()),
    ("an unknown level", GIVEN.changed("level", "certified"), {"policy": LEAST_STRICT}, {"attestation.level"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("evidence", "other", "rules"), [case[1:] for case in OTHERS], ids=[case[0] for case in OTHERS]
)
def test_what_else_decides(evidence: Given, other: dict[str, Any], rules: set[str]) -> None:
    assert failed(evidence, **other) == rules


def test_what_is_not_restricted_is_said() -> None:
    result = of(GIVEN.changed("level", "self-reported"), LEAST_STRICT, nonce=None, head=None)
    assert result.passed
    required = {rule.name for rule in RULES if rule.required}
    assert set(result.applied) == required | {"evidence.keys", "nonce.seconds", "nonce.skew"}
    assert set(result.not_applied) == set(ATTACKS) - set(result.applied)


def test_claims_of_great_size_take_no_time_and_no_space() -> None:
    result = of(GIVEN.changed("environment", {f"LD_{i}": digest(1) for i in range(9_000)}))
    assert {failure.rule for failure in result.failures} == SHARED["environment"]
    assert len(result.failures) == 2 * 21
    assert result.failures[20].found == "more like these"
    for path, value in (("environment", {str(i): "" for i in range(10**5)}), ("job.recipients", [OWNER] * 10**5)):
        result = of(GIVEN.changed(path, value))
        assert {failure.rule for failure in result.failures} == SHARED.get(path, {"release.recipients"})
        assert "more than 10,000 entries" in result.failures[0].found
    assert failed(GIVEN.changed("device.name", "NVIDIA GeForce RTX 40" + "9" * 10**6 + "0")) == {"device.names"}


def test_the_result_affirms_only_what_a_quote_shows() -> None:
    def token_of(evidence: Given, policy: Policy = STRICT) -> dict[str, Any]:
        return of(evidence, policy).to_json()["submods"]["wgpu-lora"]

    vector = "ear.trustworthiness-vector"
    assert (token_of(GIVEN)["ear.status"], token_of(GIVEN)[vector]) == ("affirming", {"instance-identity": 2})
    assert vector not in token_of(GIVEN, LEAST_STRICT)
    wrong = token_of(GIVEN.changed("quote.key_pem", public_pem()).changed("package.sha256", digest("x")))
    assert (wrong["ear.status"], wrong[vector]) == ("contraindicated", {"instance-identity": 97, "executables": 33})
    rules = [failure["rule"] for failure in wrong["ear.wgpu-lora.failures"]]
    assert rules == ["attestation.tpm_keys", "package.sha256"]


PATHS = sorted({path for cases in ATTACKS.values() for path, _ in cases} - {"dependencies.extra"})


@settings(max_examples=60, deadline=None)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_no_claim_raises_whatever_it_is(path: str, value: Any) -> None:
    failed(GIVEN.changed(path, value))


# -- policies from claims ----------------------------------------------------------------------------------------------


def failed_by(evidence: Given, text: str) -> set[str]:
    return failed(evidence, Policy.parse(text.encode()), head=None)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("quoted", [False, True])
def test_a_policy_accepts_its_own_claims_and_no_changed_ones(strict: bool, quoted: bool) -> None:
    evidence = GIVEN if quoted else replace(GIVEN.changed("level", "self-reported"), quote=None)
    text = policy_for(evidence.claims, evidence.quote, strict)
    assert "Not so here" not in text
    assert failed_by(evidence, text) == set()
    if strict and quoted:
        assert of(GIVEN, Policy.parse(text.encode())).not_applied == []
    update = evidence.changed("kernel.release", "6.8.1").changed("device.driver", "581.0")
    assert failed_by(update, text) == ({"kernel.releases", "device.drivers"} if strict else set())
    for path, value, rule in (
        ("package.sha256", digest("changed"), "package.sha256"),
        ("base.sha256", digest("changed"), "base.sha256"),
        ("job.data.0.sha256", digest("changed"), "data.sha256"),
        ("device.name", "NVIDIA GeForce RTX 4080", "device.names"),
        ("job.options.learning_rate", 3e-4, "recipe.options"),
        ("job.options.max_steps", 101, "training.max_steps"),
    ):
        assert failed_by(evidence.changed(path, value), text) == {rule}


@pytest.mark.parametrize("kind", ["ecdsa", "rsassa", "rsapss"])
def test_quotes_of_tpms(kind: str) -> None:
    recorded = json.loads((FIXTURES / "protect" / "quotes.json").read_text())
    quote = tpm.verify(recorded["quotes"][kind], bytes.fromhex(recorded["digest"]))
    text = policy_for(GIVEN.claims, quote)
    folded = {**quote, "key_pem": quote["key_pem"].replace("\n", "\r\n")}
    ima, boot = ({**quote, "pcrs": {**quote["pcrs"], number: "ab" * 32}} for number in (10, 7))
    for other, rules in ((quote, set()), (folded, set()), (ima, set()), (boot, {"attestation.pcrs"})):
        assert failed_by(replace(GIVEN, quote=other), text) == rules
    assert failed_by(GIVEN, text) == {"attestation.tpm_keys", "attestation.pcrs"}


def test_what_the_claims_do_not_meet_or_state_is_a_comment() -> None:
    evidence = GIVEN.changed("dependencies.numpy.intact", False).changed("wgpu.native_sha256", ...)
    evidence = evidence.changed("job.options.max_steps", None).changed("environment.LD_PRELOAD", digest("x"))
    text = policy_for(evidence.claims, evidence.quote)
    for line in ("# native_sha256 is not known", "# max_steps is not known", "# intact = true", "# forbidden = [\n"):
        assert line in text
    assert failed_by(evidence, text) == set()
    name = 'llvmpipe [LLVM 15*] "x"\\ \x7f ¹'
    claims = copy.deepcopy(GIVEN.claims)
    claims["device"]["name"] = name
    claims["environment"]["A.b c\n"] = digest("x")
    odd = replace(GIVEN, claims=claims)
    text = policy_for(odd.claims, odd.quote, strict=True)
    assert failed_by(odd, text) == set()
    assert failed_by(odd.changed("device.name", name.replace("*", "7")), text) == {"device.names"}
    assert toml("\x7f\u2028\x9b\n") == '"\\U0000007f\\U00002028\\U0000009b\\n"'


@settings(max_examples=40, deadline=None)
@given(path=st.sampled_from(PATHS), value=JSON, strict=st.booleans())
def test_hostile_claims_make_a_policy_that_is_valid_or_lacks_what_is_required(
    path: str, value: Any, strict: bool
) -> None:
    evidence = GIVEN.changed(path, value)
    text = policy_for(evidence.claims, evidence.quote, strict)
    error, policy = "", None
    try:
        policy = Policy.parse(text.encode("utf-8", "surrogatepass"))
    except UserError as refusal:
        error = str(refusal)
    if policy is None:
        assert any(word in error for word in ("missing", "tpm_keys", "only_pinned", "no option", "utf-8")), text
        return
    failures = appraise(evidence, policy, nonce=None, now=None).failures
    assert {failure.rule for failure in failures} <= {"evidence.keys"}, text
