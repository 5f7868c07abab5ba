"""Pipelines that published tokenizers have are taken, and read texts as the library alone does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from support.tokenizers import PIPELINES, document

from wgpu_lora.data import Tokenizer
from wgpu_lora.tokenizer.local_tokenizer import LocalTokenizer

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
    ours = LocalTokenizer.open(json.dumps(stated))
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode([text], special=True) == [ids]
        assert ours.encode([text]) == [theirs.encode(text, add_special_tokens=False).ids]
        assert ours.decode(ids, True) == theirs.decode(ids)
    assert json.loads(ours.to_json()) == json.loads(theirs.to_str())


@pytest.mark.parametrize("name", ["llama 2, mistral 0.1, phi 3", "t5"])
def test_it_is_the_same_in_a_child(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(document(name)))
    found, here = Tokenizer.load(tmp_path), LocalTokenizer.open(json.dumps(document(name)))
    assert found is not None
    assert found.encode_all(TEXTS, True) == here.encode(TEXTS, True)
    for text in TEXTS:
        assert found.encode_with_offsets(text) == Tokenizer(here).encode_with_offsets(text)
    ids = found.encode(TEXTS[0])
    assert found.decode(ids) == here.decode(ids, True)
    assert found.files()["tokenizer.json"] == here.to_json()
    assert (found.token_id("<s>"), found.token_id("nothing")) == (1, None)
    assert found.vocab_size == here.info.vocab_size
    assert found.special_texts == ("<unk>", "<s>", "</s>")


def test_what_others_cut_and_pad_is_left_to_them() -> None:
    stated = document("gpt2")
    stated["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    stated["padding"] = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_id": 0, "pad_token": "x"}
    [ids] = LocalTokenizer.open(json.dumps(stated)).encode(["a text of some length"])
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
