"""Tokenizers made to harm: refused before the library sees them, or ended by the limits of its child."""

from __future__ import annotations

import base64
import json
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile import refused
from support.tokenizers import (
    ADDED,
    BYTE_BPE,
    UNIGRAM,
    WORD_PIECE,
    around,
    byte_level,
    decoding,
    metaspace,
    normalizing,
    of,
    replace,
    split,
    splitting,
)  # fmt: skip

from wgpu_lora.data import Tokenizer
from wgpu_lora.tokens.backend import BackendError, Local
from wgpu_lora.tokens.patterns import PatternError, shape_of

Part = dict[str, Any]


def stated(**parts: Any) -> Part:
    return {"version": "1.0", "added_tokens": ADDED, "model": BYTE_BPE, **parts}


def charsmap(text: bytes, size: int | None = None) -> Part:
    """A table that makes `text` of every a."""
    units = [1 << 10] + [0] * 255
    units[1 ^ 97] = (1 ^ 97 ^ 200) << 10 | 1 << 8 | 97
    trie = struct.pack("<256I", *units)
    blob = struct.pack("<I", len(trie) if size is None else size) + trie + text
    return of("Precompiled", precompiled_charsmap=base64.b64encode(blob).decode())


def model(kind: Part, **fields: Any) -> Part:
    return stated(model={**kind, **fields})


def template(**fields: Any) -> Part:
    return stated(post_processor={**around("<s>"), **fields})


def families() -> Iterator[tuple[str, Part | str, str]]:
    """(name, tokenizer.json, words of the refusal), for many sizes of each kind."""
    bytes_normalizer = of("ByteLevel")
    for count in (2, 26, 40):
        yield f"bytes {count}", stated(normalizer=normalizing(*[bytes_normalizer] * count)), "more than 1 ByteLevel"
        yield f"bytes of words {count}", stated(pre_tokenizer=splitting(*[byte_level()] * count)), "more than 1"
    yield "bytes twice", stated(normalizer=bytes_normalizer, pre_tokenizer=byte_level()), "more than 1 ByteLevel"
    yield "bytes deep", stated(normalizer=normalizing(bytes_normalizer, normalizing(bytes_normalizer))), "more than 1"
    for pattern in ("", "(?=.)", "a*", "^", "$", r"\b", "(?!x)", "a?|b", "(?:a{0,3})", r"(?<=a)"):
        for count in (1, 14):
            parts = [replace(pattern, "xy", "Regex")] * count
            yield f"nothing {pattern!r} {count}", stated(normalizer=normalizing(*parts)), "the empty text"
            yield f"decoding nothing {pattern!r} {count}", stated(decoder=decoding(*parts)), "the empty text"
    yield "an empty text", stated(normalizer=replace("", "a")), "the empty text"
    for count, size in ((40, 2), (8, 2), (2, 30), (3, 60)):
        parts = [replace("a", "a" * size)] * count
        yield f"growth {count} {size}", stated(normalizer=normalizing(*parts)), "much longer"
        yield f"decoding growth {count} {size}", stated(decoder=decoding(*parts)), "much longer|more than 24 parts"
    yield "growth over all", stated(normalizer=replace("a", "a" * 40), pre_tokenizer=metaspace()), "much longer"
    prefixes = [of("Prepend", prepend="aaaaaaaa")] * 2
    yield "prefixes", stated(normalizer=normalizing(*prefixes, replace("a", "aa"))), "much longer"
    yield "marks", stated(pre_tokenizer=splitting(*[metaspace()] * 9)), "much longer|more than 2 Metaspace"
    many = [of("NFC")] * 30
    yield "many parts", stated(normalizer=normalizing(*many)), "more than 24 parts"
    yield "many empty sequences", stated(normalizer=normalizing(*[normalizing()] * 30)), "more than 24 parts"
    yield "parts of both", stated(normalizer=normalizing(*many[:12]), pre_tokenizer=splitting(*[split("a")] * 12)), "24"
    deep: Part = of("NFC")
    for _ in range(6):
        deep = normalizing(deep)
    yield "nested", stated(normalizer=deep), "nested too deeply"
    for name in ("single", "pair"):
        long = {name: around("<s>")[name] * 2000}
        yield f"a long {name}", template(**long), "too long"
        yield f"a text again in a {name}", template(**{name: around()["single"] * 2}), "repeats a text"
    ids = {"<s>": {"id": "<s>", "ids": [1] * 2000, "tokens": ["a"] * 2000}}
    yield "many ids", template(special_tokens=ids), "at most 16"
    yield "a second text", template(single=[{"Sequence": {"id": "B", "type_id": 0}}]), "second text"
    yield "an unknown token", template(special_tokens={}), "an invalid piece"
    for size in (65, 2_000_000):
        yield (
            f"a long character {size}",
            stated(normalizer=charsmap(b"b" * size)),
            "takes more than|replaces a character by more than",
        )
    for size in (0, 3, 0xFFFFFFF0, 1 << 20):
        yield f"a table of {size}", stated(normalizer=charsmap(b"b", size)), "stated size is wrong"
    yield "no table", stated(normalizer=of("Precompiled", precompiled_charsmap="")), "stated size is wrong"
    yield "no base64", stated(normalizer=of("Precompiled", precompiled_charsmap="é")), "not base64"
    for most in (2**64, 0, -1, 1.5, "9"):
        yield f"words of {most!r}", model(WORD_PIECE, max_input_chars_per_word=most), "must be a whole number"
    for id in (2**22 + 1, 2**31, 2**32, 2**64, -1, 1.0, "1", True, None):
        yield f"an id of {id!r}", model(BYTE_BPE, vocab={"a": id}), "token id|whole number"
        yield f"an added id of {id!r}", stated(added_tokens=[{**ADDED[0], "id": id}]), "whole number"
    yield "a long token", model(BYTE_BPE, vocab={"a" * 2000: 0}), "more than 1,024 characters"
    yield "a long piece", model(UNIGRAM, vocab=[["a" * 2000, 0.0]]), "more than 1,024 characters"
    yield "a score", model(UNIGRAM, vocab=[["a", "1"]]), "tokens and scores"
    yield "a score without end", json.dumps(model(UNIGRAM, vocab=[["a", 7]])).replace("7", "1e999"), "and scores"
    prefixed = json.dumps(model(BYTE_BPE, continuing_subword_prefix="zzz"))
    yield "a prefix", prefixed, "continuing_subword_prefix.*not supported"
    yield "a prefix in escapes", prefixed.replace("subword", "\\u0073ubword"), "continuing_subword_prefix.*not supp"
    yield "a key twice", prefixed.replace('"zzz"', 'null, "continuing_subwor\\u0064_prefix": "zzz"'), "is repeated"
    for name, kind in (("normalizer", "Foo"), ("pre_tokenizer", "NFC"), ("decoder", "Split"), ("post_processor", "")):
        yield f"an unknown {name}", stated(**{name: of(kind)}), "there is an unknown part"
    yield "an unknown model", model(BYTE_BPE, type="Foo"), "is unknown"
    yield "a field that is missing", stated(normalizer=of("Replace", content="a")), "has no pattern"
    yield "spaces to cut", stated(decoder=of("Strip", content=" ", start=2**63, stop=0)), "whole number"
    yield "an empty suffix", stated(decoder=of("BPEDecoder", suffix="")), "a text of 1 to"
    yield "half a character", json.dumps(stated(normalizer=replace("a", "\ud800"))), "a value that JSON cannot"
    yield "no number", json.dumps(stated(x=float("nan"))), "not JSON"
    yield "deep", '{"model":' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"


FAMILIES = {name: (given, words) for name, given, words in families()}


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_refused_before_the_library_sees_it(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, words = FAMILIES[name]
    monkeypatch.setattr("wgpu_lora.data.tokenizer.Child", None)
    (tmp_path / "tokenizer.json").write_text(given if isinstance(given, str) else json.dumps(given))
    refused(lambda: Tokenizer.load(tmp_path), words)


def test_many_values_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wgpu_lora.tokens.document.MAX_VALUES", 1 << 18)
    (tmp_path / "tokenizer.json").write_text('{"model":[' + "[]," * 150_000 + "[]]}")
    refused(lambda: Tokenizer.load(tmp_path), "more than 262,144 values")


EXPLOSIVE = [
    r"(\w+\s?)+$", "(a|a)*b", "(a*)*", "(a+)+", "(ab?)+", "((a{1,9}){1,9}){1,9}", "(?:a{1,3}+|b)c", "a{1,3}+b",
    "a?" * 30 + "a" * 30, "(?:a|a)" * 30, "x*x*x*x*x*y", "(?=(a+)+b)a", "(?!(a+)+b)a", "(?>(a+)+)b", "((?=a)b*)*",
    r"(a)\1", "(?R)", r"\g<0>", r"(?<n>a)\k<n>", "(?~a)", "(?#x)a", "(?x: a )", "a**", "a{3}{3}", "a{3}?*", "a{9999}",
    "(?:a{200}){200}", "[[:alph:]]", "(a|b|c){1,9}", "(?:a?b?){9}", r"(?:\p{L}\p{L}*)+", r"(?:-\-+)*",
    r"(?i)(?:\p{L}\p{M}*)+", r"(?i:(?:\p{L}\p{M}*)+)", r"(?:\p{L}+\p{M}*)+", r"(?:\p{L}\p{M}*)+*", r"(?:.\p{M}*)+",
    r"(?:\p{L}\p{M}*)+" * 4, "[]a]", r"\X+", r"\Ga", "(?<=a+)b", "[a", "a)", "(a", "\\", "*a",
    "(" * 50 + ")" * 50, "a" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("pattern", EXPLOSIVE)
def test_a_pattern_that_may_explode_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        shape_of(pattern)


def test_a_pattern_that_is_taken_does_not_explode() -> None:
    """Made-up patterns: what passes is matched within a second and the library's own bounds, or refused by it."""
    rng = random.Random(7)
    texts = ["a" * 60, "ab" * 30, "a" * 59 + "!", " " * 60 + "x"]
    taken = 0

    def atom(depth: int) -> str:
        if depth and rng.random() < 0.4:
            return rng.choice(["(", "(?:", "(?i:", "(?=", "(?!", "(?>"]) + alternatives(depth - 1) + ")"
        return rng.choice(["a", "b", " ", ".", r"\w", r"\s", "[^b]", r"\p{L}", "[a-z&&[^b]]"])

    def alternatives(depth: int) -> str:
        repeats = ["", "", "*", "+", "?", "{2}", "{1,3}", "*?", "++", "{3,90}"]
        return "|".join(
            "".join(atom(depth) + rng.choice(repeats) for _ in range(rng.randint(1, 4)))
            for _ in range(rng.choice([1, 1, 2]))
        )

    while taken < 150:
        pattern = alternatives(2) + rng.choice(["", "$", "!"])
        try:
            shape_of(pattern)
            found = Local.opened(json.dumps(stated(pre_tokenizer=split(pattern))))
        except (PatternError, BackendError):
            continue
        begin = time.process_time()
        found.encode(texts)
        assert time.process_time() - begin < 1, pattern
        taken += 1


# What passes the checks costs time or memory by the length of a text, and is ended where it is too much.
ATTACKS: dict[str, Part] = {
    "look-ahead": stated(pre_tokenizer=split("(?=a*a*a*b)a")),
    "charsmap": stated(normalizer=charsmap(b"b" * 60)),
    "charsmap that leads out": stated(normalizer=of("Precompiled", precompiled_charsmap="CAAAAAAAEAAAAAAA")),
    "unigram": model(UNIGRAM, vocab=[["<unk>", 0.0], *(["a" * i, -1.0 / i] for i in range(1, 1000))]),
    "words": {**model(WORD_PIECE, vocab={"a": 0, "<unk>": 1}, continuing_subword_prefix="",
                      max_input_chars_per_word=1000)},
    "unknown": model(BYTE_BPE, unk_token="nothing", vocab={"b": 0}, merges=[]),
    "ids far apart": model(BYTE_BPE, vocab={"a": 0, "b": 1 << 22}, merges=[]),
    "spaces": stated(pre_tokenizer=split(r"\s+$")),
}  # fmt: skip
RUN = """
import json, re, resource, sys, time
from pathlib import Path
from wgpu_lora.data import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.tokens import process
process.SECONDS, process.SECONDS_PER_MIB, process.MEMORY = 0.3, 3, 300 << 20
for name, stated in json.load(sys.stdin).items():
    Path("tokenizer.json").write_text(json.dumps(stated))
    begin = time.monotonic()
    try:
        found = Tokenizer.load(Path("."))
        for text in ("a" * 80_000, " " * 20_000 + "x", "hello"):
            found.decode(found.encode(text, True)[:1000])
        said = ""
    except UserError as error:
        said = str(error)
    # What getrusage says of a process itself goes back to before its exec, to whoever forked it.
    here = int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(json.dumps([name, time.monotonic() - begin, [here, child], said]), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's memory")
def test_what_is_not_foreseen_costs_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(ATTACKS), capture_output=True, text=True, cwd=tmp_path, check=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == list(ATTACKS)
    assert done.stderr == ""
    said = {}
    for name, seconds, (here, child), sentence in rows:
        assert seconds < 15, name
        assert here < 300, name
        assert child < 500, name
        said[name] = sentence
    assert "computed for more than" in said["look-ahead"]
    assert "failed on" in said["charsmap that leads out"]
    assert "failed on" in said["unknown"]
    assert said["ids far apart"] == ""
