"""Patterns over module names mean what Python's `re` means, and cost no more than about a second."""

import re
import time

import pytest

from wgpu_lora import untrusted_patterns
from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_config import parse_config
from wgpu_lora.untrusted_patterns import first_matches

NAMES = [f"model.layers.{i}.{module}" for i in range(12) for module in ("self_attn.q_proj", "mlp.up_proj", "x.in")]
PATTERNS = [
    "q_proj", r"layers\.[01]\.mlp\.up_proj", "^model.layers.1.x.in$", "proj", r".*\.(q|v)_proj", r"\w+\.\d{1,}\..*",
    r"(?!.*layers\.1\.).*up_proj", r"(?i)MODEL\..*", r".*(?<=mlp\.)up_proj", r".*\.(\d)\1\..*", r".{,27}",
    r"(?P<a>model).*", "model++.*", "", "(?x) model .* ",
]  # fmt: skip


@pytest.mark.parametrize("endings", [False, True])
def test_they_mean_what_re_means(endings: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, by whichever way it is matched, and all in one child."""
    usable = [p for p in PATTERNS if not (endings and p.startswith("(?") and p[2] in "ix")]  # flags come first
    meant = [rf"(.*\.)?({p})" if endings else p for p in usable]
    expected = [[0 if re.fullmatch(pattern, name) else None for name in NAMES] for pattern in meant]
    assert first_matches([[p] for p in usable], NAMES, endings) == expected
    assert any(any(v == 0 for v in row) for row in expected)
    (first,) = first_matches([usable[::-1]], NAMES, endings)
    backwards = [next((i for i, row in enumerate(expected[::-1]) if row[n] == 0), None) for n in range(len(NAMES))]
    assert first == backwards
    monkeypatch.setattr(untrusted_patterns, "_in_child", None)
    assert first_matches([PATTERNS[:6]], NAMES, endings)[0]  # without a process


@pytest.mark.parametrize(("pattern", "endings"), [("${2}", False), ("a^{2}", True), ("?", True)])
def test_what_re_refuses_is_refused(pattern: str, endings: bool) -> None:
    """RE2 would take it."""
    with pytest.raises(UserError, match="is not a regular expression"):
        first_matches([[pattern]], NAMES, endings)


def test_a_hostile_pattern_is_ended() -> None:
    begin = time.process_time()
    with pytest.raises(UserError, match="exceeded its computation limit"):
        first_matches([["x", r"(?=((a|a)*)*b).*"]], ["a" * 60 + "c"])
    deep = "(" * 2000 + "a" + ")" * 2000
    assert first_matches([[deep]], ["a"] * 50) == [[0] * 50]
    assert time.process_time() - begin < 1
    with pytest.raises(UserError, match=r"rank_pattern in x has a bad pattern: .*unterminated"):
        parse_config({"peft_type": "LORA", "target_modules": [], "rank_pattern": {"(?=": 1}}, "x")
