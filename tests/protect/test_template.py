"""A policy made from claims accepts them, and nothing that it pins may change."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import FIXTURES
from support.policies import GIVEN, JSON, NONCE, NOW, Given, digest

from wgpu_lora.errors import UserError
from wgpu_lora.protect.attestation import tpm_quotes
from wgpu_lora.protect.policies.appraisal import appraise
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.policies.policy_template import policy_for, toml


def _paths(path: str, value: Any) -> list[str]:
    """Of all values below one."""
    if isinstance(value, dict):
        named = {f"{path}.{key}": one for key, one in value.items() if "." not in key}
        return [found for name, one in named.items() for found in (name, *_paths(name, one))]
    return [f"{path}.{i}" for i in range(len(value))] if isinstance(value, list) else []


PATHS = [path for section in GIVEN.claims for path in (section, *_paths(section, GIVEN.claims[section]))]


def failed(evidence: Given, text: str) -> set[str]:
    policy = Policy.parse(text.encode())
    return {failure.rule for failure in appraise(evidence, policy, nonce=NONCE, now=NOW).failures}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("quoted", [False, True])
def test_a_policy_accepts_its_own_claims(strict: bool, quoted: bool) -> None:
    evidence = GIVEN if quoted else replace(GIVEN.changed("level", "self-reported"), quote=None)
    text = policy_for(evidence.claims, evidence.quote, strict)
    assert "Not so here" not in text
    assert failed(evidence, text) == set()
    update = evidence.changed("kernel.release", "6.8.1").changed("device.driver", "581.0")
    assert failed(update, text) == ({"kernel.releases", "device.drivers"} if strict else set())
    for path in ("package.sha256", "base.sha256", "job.data.0.sha256"):
        assert failed(evidence.changed(path, digest("changed")), text)
    assert failed(evidence.changed("device.name", "NVIDIA GeForce RTX 4080"), text) == {"device.names"}
    assert failed(evidence.changed("job.options.learning_rate", 3e-4), text) == {"recipe.options"}
    assert failed(evidence.changed("job.options.max_steps", 101), text) == {"training.max_steps"}


@pytest.mark.parametrize("kind", ["ecdsa", "rsassa", "rsapss"])
def test_quotes_of_tpms(kind: str) -> None:
    recorded = json.loads((FIXTURES / "protect" / "quotes.json").read_text())
    quote = tpm_quotes.verify(recorded["quotes"][kind], bytes.fromhex(recorded["digest"]))
    text = policy_for(GIVEN.claims, quote)
    assert failed(replace(GIVEN, quote=quote), text) == set()
    folded = quote["key_pem"].replace("\n", "\r\n")
    assert failed(replace(GIVEN, quote={**quote, "key_pem": folded}), text) == set()
    ima, boot = ({**quote, "pcrs": {**quote["pcrs"], number: "ab" * 32}} for number in (10, 7))
    assert failed(replace(GIVEN, quote=ima), text) == set()
    assert failed(replace(GIVEN, quote=boot), text) == {"attestation.pcrs"}
    assert failed(GIVEN, text) == {"attestation.tpm_keys", "attestation.pcrs"}


def test_a_strict_policy_pins_every_rule() -> None:
    strict = Policy.parse(policy_for(GIVEN.claims, GIVEN.quote, strict=True).encode())
    assert appraise(GIVEN, strict, nonce=NONCE, now=NOW, head=(9, digest("head"))).not_applied == []


def test_what_the_claims_do_not_meet_or_state_is_a_comment() -> None:
    evidence = GIVEN.changed("dependencies.numpy.intact", False).changed("wgpu.native_sha256", ...)
    evidence = evidence.changed("job.options.max_steps", None).changed("environment.LD_PRELOAD", digest("x"))
    text = policy_for(evidence.claims, evidence.quote)
    assert "# native_sha256 is not known here" in text
    assert "# max_steps is not known here" in text
    assert "# intact = true" in text
    assert "# forbidden = [\n" in text
    assert failed(evidence, text) == set()


def test_names_with_wildcards_and_odd_characters() -> None:
    name = 'llvmpipe [LLVM 15*] "x"\\ \x7f ¹'
    claims = copy.deepcopy(GIVEN.claims)
    claims["device"]["name"] = name
    claims["environment"]["A.b c\n"] = digest("x")
    odd = replace(GIVEN, claims=claims)
    text = policy_for(odd.claims, odd.quote, strict=True)
    assert failed(odd, text) == set()
    assert failed(odd.changed("device.name", name.replace("*", "7")), text) == {"device.names"}
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
    except UserError as found:
        error = str(found)
    if policy is None:
        assert any(word in error for word in ("required", "tpm_keys", "only_pinned", "no option", "utf-8")), (
            error,
            text,
        )
    else:
        failures = appraise(evidence, policy, nonce=None, now=None).failures
        assert {failure.rule for failure in failures} <= {"evidence.keys"}, text
