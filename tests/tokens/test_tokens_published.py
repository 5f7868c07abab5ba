"""Pipelines that published tokenizers have are taken, and read texts as the library alone does."""

from __future__ import annotations

import json
import time
from copy import deepcopy
from pathlib import Path

import pytest
import tokenizers
from support.tokenizers import PIPELINES, document

from wgpu_lora.data import Tokenizer
from wgpu_lora.tokens.backend import Local
from wgpu_lora.tokens.document import checked

TEXTS = [
    "The cat's 12345 hats,  they're ALL   here!\n\n  And the\tthird: 中文, größer ﬁ ①  ",
    "",
    "<s>the</s> the  Ａ ﷺ é👍🏽\r\n\u3000x",
    " leading ''spaces`` don't 1,000,000.50",
]


@pytest.mark.parametrize("name", PIPELINES)
def test_texts_are_read_as_the_library_reads_them(name: str) -> None:
    stated = document(name)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(stated))
    ours = Local.opened(checked(stated).text)
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode([text], special=True) == [ids]
        assert ours.encode([text]) == [theirs.encode(text, add_special_tokens=False).ids]
        assert ours.decode(ids, True) == theirs.decode(ids)
    assert json.loads(ours.to_str()) == json.loads(theirs.to_str())


@pytest.mark.parametrize("name", ["llama 2, mistral 0.1, phi 3", "t5"])
def test_it_is_the_same_in_a_child(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(document(name)))
    found, here = Tokenizer.load(tmp_path), Local.opened(json.dumps(document(name)))
    assert found is not None
    assert found.encode_all(TEXTS, True) == here.encode(TEXTS, True)
    assert found.encode_with_offsets(TEXTS) == here.encode_with_offsets(TEXTS)
    ids = found.encode(TEXTS[0])
    assert found.decode(ids) == here.decode(ids, True)
    assert found.files()["tokenizer.json"] == here.to_str()
    assert (found.token_id("<s>"), found.token_id("nothing")) == (1, None)
    assert found.vocab_size == here.facts.vocab_size
    assert found.special_texts == ("<unk>", "<s>", "</s>")


def test_what_others_cut_and_pad_is_left_to_them() -> None:
    stated = document("gpt2")
    stated["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    stated["padding"] = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_id": 0, "pad_token": "x"}
    [ids] = Local.opened(checked(stated).text).encode(["a text of some length"])
    assert len(ids) > 2


def test_dropout_is_ignored_with_a_note(tmp_path: Path) -> None:
    stated = document("gpt2")
    stated["model"] = {**stated["model"], "dropout": 0.9}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stated))
    found = Tokenizer.load(tmp_path)
    assert found is not None
    assert "dropout" in found.notes[0]
    text = "the other thing that the others think " * 20
    assert len({tuple(found.encode(text)) for _ in range(5)}) == 1
    assert json.loads(found.files()["tokenizer.json"])["model"]["dropout"] is None


def test_unknown_fields_are_ignored_with_a_note() -> None:
    stated = deepcopy(document("t5"))
    stated["added_tokens"][0]["new"] = stated["model"]["new"] = stated["decoder"]["new"] = 1
    found = checked(stated)
    assert [note for note in found.notes if "unknown fields" in note] == list(found.notes) != []
    assert found.text == checked(document("t5")).text
    assert not checked(document("t5")).notes


def test_what_works_on_long_words_is_cut_short_with_a_note() -> None:
    stated = document("gpt2")
    stated["model"] = {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]",
                       "continuing_subword_prefix": "##", "max_input_chars_per_word": 10**9}  # fmt: skip
    found = checked(stated)
    assert "1,000 characters" in found.notes[0]
    assert json.loads(found.text)["model"]["max_input_chars_per_word"] == 1000


def test_as_many_tokens_may_be_added_as_speech_takes() -> None:
    added = [{"id": 1000 + i, "content": f"<|{i}|>", "special": True} for i in range(70_000)]
    assert checked({**document("gpt2"), "added_tokens": added})


def test_a_long_way_of_a_line_break_is_taken() -> None:
    stated = document("gpt2")
    texts = (("String", " ", "\u2581"), ("String", "\n", "<0x0A>"))
    replaced = [{"type": "Replace", "pattern": {kind: old}, "content": new} for kind, old, new in texts]
    stated["pre_tokenizer"] = None
    stated["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, *replaced]}
    assert checked(stated)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{L}+(?:'\p{L}+)*",
        r"(?:\p{L}\p{M}*)+",
        "[[:punct:]]",
        "[^a[:^space:]]+",
        "((A|B|C){1,4})Z",
        "(?:[ab]|a){1,4}",
    ],
)
def test_patterns_of_words_are_taken(pattern: str) -> None:
    stated = document("gpt2")
    stated["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    begin = time.process_time()
    Local.opened(checked(stated).text).encode(
        ["a" * 20_000 + "!", "'a" * 9_999, "A\u0301" * 9_999 + ".", "ABC" * 9_999]
    )
    assert time.process_time() - begin < 5
