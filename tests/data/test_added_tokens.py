"""Tokens that only the files beside a tokenizer.json name are added as transformers adds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.data import SPECIAL, backend_json

from wgpu_lora.data import Tokenizer
from wgpu_lora.errors import UserError

TEXT = "<tool>the sky</tool><|end|> <pad>"
CONFIG, WRONG = "tokenizer_config.json", "an added token without a text or a whole id"
PLAIN = {"lstrip": False, "rstrip": False, "single_word": False}
FIRST = max([*json.loads(backend_json())["model"]["vocab"].values(), len(SPECIAL) - 1]) + 1  # the first free id


def added(content: str, **attributes: Any) -> dict[str, Any]:
    return {"content": content, **PLAIN, "normalized": False, "special": True, **attributes}


DECODER = {str(FIRST): added("<tool>"), str(FIRST + 1): added("</tool>", special=False, normalized=True)}
# Files beside tokenizer.json, and the ids that the tokens of TEXT get.
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "decoder": ({"tokenizer_config.json": {"added_tokens_decoder": DECODER}}, {"<tool>": 0, "</tool>": 1}),
    "additional": (
        {"tokenizer_config.json": {"additional_special_tokens": ["<tool>", added("</tool>", __type="AddedToken")]}},
        {"<tool>": 0, "</tool>": 1},
    ),
    "extra": ({"tokenizer_config.json": {"extra_special_tokens": ["</tool>", "<tool>"]}}, {"</tool>": 0, "<tool>": 1}),
    "named": (
        {"tokenizer_config.json": {"eos_token": "<|end|>", "pad_token": added("<pad>", __type="AddedToken")}},
        {"<|end|>": 0, "<pad>": 1},
    ),
    "map": ({"special_tokens_map.json": {"eos_token": "<|end|>", "additional_special_tokens": ["<tool>"]}},
            {"<|end|>": 0, "<tool>": 1}),
    "added_tokens": (
        {"added_tokens.json": {"<tool>": FIRST, "</tool>": FIRST + 1}, "tokenizer_config.json": {}},
        {"<tool>": 0, "</tool>": 1},
    ),
    "all": (
        {"tokenizer_config.json": {"added_tokens_decoder": DECODER, "eos_token": "<|end|>", "bos_token": "<s>"}},
        {"<tool>": 0, "</tool>": 1, "<|end|>": 2},
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, int]]:
    files, ids = CASES[request.param]
    (tmp_path / "tokenizer.json").write_text(backend_json(), encoding="utf-8")
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value), encoding="utf-8")
    return tmp_path, {token: FIRST + place for token, place in ids.items()}


def load(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return tokenizer


def test_tokens_beside_the_file_are_added(case: tuple[Path, dict[str, int]]) -> None:
    directory, ids = case
    tokenizer = load(directory)
    assert tokenizer.vocab_size == FIRST + len(ids)
    for token, id in ids.items():
        assert tokenizer.encode(f"a{token}b")[1:-1] == [id]
    again = tokenizer.files()  # also what is saved has them
    (directory / "tokenizer.json").write_text(again["tokenizer.json"], encoding="utf-8")
    assert load(directory).encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.reference
def test_ids_are_those_of_transformers(case: tuple[Path, dict[str, int]]) -> None:
    from transformers import AutoTokenizer

    directory, _ = case
    config = directory / "tokenizer_config.json"
    stated = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps({**stated, "tokenizer_class": "PreTrainedTokenizerFast"}))
    theirs, ours = AutoTokenizer.from_pretrained(directory), load(directory)
    assert ours.encode(TEXT) == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert (ours.vocab_size, ours.eos_id, ours.pad_id) == (len(theirs), theirs.eos_token_id, theirs.pad_token_id)
    assert ours.decode(ours.encode(TEXT)) == theirs.decode(theirs(TEXT)["input_ids"], skip_special_tokens=True)


def test_named_tokens_end_answers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(backend_json(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert load(tmp_path).stop_ids == {1, FIRST}
    assert "<|end|>" in load(tmp_path).end_texts


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (CONFIG, {"added_tokens_decoder": {str(FIRST + 7): added("<x>")}}, f"'<x>' the id {FIRST + 7}, but"),
        (CONFIG, {"added_tokens_decoder": {"x": added("<x>")}}, WRONG),
        (CONFIG, {"added_tokens_decoder": {"5": {"id": 3}}}, WRONG),
        (CONFIG, {"added_tokens_decoder": 3}, WRONG),
        (CONFIG, {"added_tokens_decoder": {str(FIRST): added("<x>", lstrip=3)}}, WRONG),
        (CONFIG, {"additional_special_tokens": [3]}, WRONG),
        ("added_tokens.json", {"<x>": "y"}, WRONG),
    ],
)  # fmt: skip
def test_entries_that_are_not_tokens_are_refused(tmp_path: Path, name: str, value: Any, words: str) -> None:
    (tmp_path / "tokenizer.json").write_text(backend_json(), encoding="utf-8")
    (tmp_path / name).write_text(json.dumps(value))
    with pytest.raises(UserError, match=words):
        load(tmp_path)


def test_chat_template_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(backend_json(), encoding="utf-8")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load(tmp_path).render([]) == "json"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert load(tmp_path).render([]) == "config"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert load(tmp_path).render([]) == "jinja"
