"""policy.toml: what is refused, in one sentence that says where and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policies import ALL_RULES, LEAST, OWNER, TPM, digest

from wgpu_lora.errors import UserError
from wgpu_lora.protect.policies.fields import LONGEST, WrongValue, matches, shown
from wgpu_lora.protect.policies.policy import KINDS, REQUIRED, Policy


def refused(text: str) -> str:
    with pytest.raises(UserError) as caught:
        Policy.parse(text.encode(), "The policy p.toml")
    (sentence,) = caught.value.lines
    assert sentence.startswith("The policy p.toml")
    assert len(sentence) < 500
    assert sentence.isprintable()
    return sentence


def test_values_and_defaults() -> None:
    least, full = Policy.parse(LEAST.encode()), Policy.parse(ALL_RULES.encode())
    assert (least.name, least.version, least.recipients) == ("ward", 1, (OWNER,))
    assert (least.nonce_seconds, least.skew_seconds, least.release_seconds) == (300, 5, 3600)
    assert (least.min_rows, least.max_steps) == (None, None)
    assert (full.min_rows, full.max_steps) == (800, 100)
    assert full.as_dict() == {"name": "ward", "version": 3, "sha256": full.sha256}


REFUSED = [
    (LEAST + "[devices]\nnames = ['x']", "unknown section [devices]: did you mean 'device'?"),
    (LEAST + "[device]\nname = ['x']", "unknown key 'name': did you mean 'names'?"),
    (LEAST + "[device]\nnames = 'x'", "[device]: 'names' must be a list"),
    (LEAST + "[device]\nnames = []", "[device]: 'names' must be a list of names, "),
    (LEAST + "[device]\nnames = [1]", "[device]: 'names[0]' must be text"),
    (LEAST + "[device]\nkinds = ['']", "[device]: 'kinds[0]' must be text that is not empty"),
    ("device = 3\n" + LEAST, "write [device]"),
    (LEAST + "[[device]]\nnames = ['x']", "write [device]"),
    (LEAST + "[base]\nsha256 = ['abc']", "64 lower-case hexadecimal"),
    (LEAST + f"[base]\nsha256 = ['{digest('x').upper()}']", "64 lower-case hexadecimal"),
    (LEAST + f"[base]\nsha256 = '{digest('x')}'", "'sha256' must be a list, not"),
    (LEAST + "[package]\nversions = 'newest'", "version specifier"),
    (LEAST + "[training]\nmax_steps = 0", "at least 1"),
    (LEAST + "[training]\nmax_steps = 1.5", "whole number"),
    (LEAST + "[training]\nmin_rows = true", "whole number"),
    (LEAST + "[nonce]\nseconds = nan", "finite number"),
    (LEAST + "[nonce]\nseconds = 0", "between 1 and 86,400 seconds"),
    (LEAST + "[nonce]\nskew = -1", "between 0 and 300 seconds"),
    (LEAST + "[nonce]\nskew = inf", "finite number"),
    (LEAST + "[dependencies]\nintact = false", "must be true, or left out"),
    (LEAST + "[dependencies]\nonly_pinned = true", "no [dependencies.pinned]"),
    (LEAST + f"[dependencies.pinned]\na_b = '{digest(1)}'\nA-B = '{digest(2)}'", "twice"),
    (LEAST + "[environment.only]\nPATH = 'x'", "64 lower-case hexadecimal"),
    (LEAST + "[recipe.options]\nlearning_rat = 1", "no option 'learning_rat': did you mean 'learning_rate'?"),
    (
        LEAST + "[recipe.options]\nlearning_rate = { most = 1 }",
        "'options.learning_rate.most' is not known: use min, max and allow",
    ),
    (LEAST + "[recipe.options]\nlearning_rate = {}", "min, max or allow"),
    (LEAST + "[recipe.options]\nlearning_rate = { max = nan }", "finite number"),
    (LEAST + "[recipe.options]\nobjective = { allow = [] }", "at least one value"),
    (
        LEAST + "[recipe.options]\nobjective = [['sft']]",
        "'options.objective' must be an object, text, true or false or a number",
    ),
    (LEAST.replace('"self-reported"', '"quoted"'), "add 'tpm_keys'"),
    (LEAST.replace('"self-reported"', '"trusted"'), "must be 'self-reported' or 'quoted', not"),
    (LEAST.replace('"self-reported"', f"\"self-reported\"\ntpm_keys = ['''{TPM}''']"), 'needs level = "quoted"'),
    (ALL_RULES.replace("{ 0 =", "{ 24 ="), "from 0 to 23"),
    (ALL_RULES.replace("BEGIN PUBLIC", "BEGIN PRIVATE"), "public key in PEM"),
    (LEAST.replace(OWNER, OWNER[:-1] + ("q" if OWNER[-1] != "q" else "p")), "must be an age recipient"),
    (LEAST.replace("version = 1", "version = '1'"), "whole number"),
    (LEAST.replace("version = 1", "version = 99999999999999999999"), "64 bits"),
    (LEAST.replace("version = 1", "version = 1\nversion = 2"), "not valid TOML"),
    (LEAST + "[data]\nsha256 = []", "not valid TOML"),
    (LEAST + "[device]\n'\\u202enames' = ['x']", "unknown key"),
    ("", "has no 'name' in [policy]"),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_refused(changed: str, said: str) -> None:
    assert said in refused(changed)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("policy", "name"),
        ("policy", "version"),
        ("release", "recipients"),
        ("attestation", "level"),
        ("data", "sha256"),
    ],
)
def test_what_is_required_cannot_be_left_out(section: str, key: str) -> None:
    lines = [line for line in LEAST.splitlines() if not line.startswith(f"{key} = ")]
    assert f"has no '{key}' in [{section}], which is required" in refused("\n".join(lines))


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(LEAST)
    assert Policy.read(path) == Policy.parse(LEAST.encode())
    with path.open("ab") as file:
        file.write(b"#" * (10 << 20))
    with pytest.raises(UserError, match="is longer than"):
        Policy.read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not valid TOML"):
        Policy.read(path)
    for missing in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(UserError, match="cannot be read"):
            Policy.read(missing)


@pytest.mark.parametrize(
    ("text", "pattern", "is_match"),
    [
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
    ],
)
def test_wildcards(text: str, pattern: str, is_match: bool) -> None:
    assert matches(text, pattern) == is_match


def test_values_are_shown_short_and_printable() -> None:
    for value in ("a" * 1000, 10**5000, "\x1b[31m\n", float("nan"), {"a": ["\u202e"]}, None):
        assert shown(value).isprintable()
        assert len(shown(value)) <= LONGEST
    assert shown("x") == "'x'"


TOML = st.recursive(
    st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(key=st.sampled_from(sorted(KINDS)), value=TOML)
def test_no_value_raises_anything_else(key: tuple[str, str], value: object) -> None:
    kind = KINDS[key]
    said = ""
    try:
        said = kind.show(kind.read(value))
    except WrongValue as error:
        said = str(error)
    assert said.isprintable()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: (LEAST + text).encode("utf-8", "replace")))
def test_hostile_bytes(data: bytes) -> None:
    said = ""
    try:
        Policy.parse(data)
    except UserError as error:
        said = str(error)
    assert said.isprintable()


def test_the_page_on_policies() -> None:
    """Its example is a policy, and its table has every key."""
    page = (Path(__file__).parents[2] / "docs/protected-policy.md").read_text()
    example = page.partition("```toml\n")[2].partition("```")[0]
    policy = Policy.parse(example.encode())
    assert (policy.name, policy.min_rows, policy.max_steps) == ("ward-7", 500, 2000)
    named = [
        name for line in page.splitlines() if line.startswith("| `") for name in line.split("|")[1].split("`")[1::2]
    ]
    assert sorted(named) == sorted(f"{section}.{key}" for section, key in KINDS)
    for section, key in REQUIRED:
        assert f"`{section}.{key}`" in page.partition("are required.")[0]
