"""The formats of preference rows: what becomes of their prompts, and which rows are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.data import chat, small_tokenizer, trained_text
from support.sources import ids_of, prepared, refused, written

from wgpu_lora.data import python_source
from wgpu_lora.data.preference_formats import LABELLED, PAIRS, shared_prompt
from wgpu_lora.data.tokenized_data import Cut
from wgpu_lora.errors import UserError

PAIR: dict[str, Any] = {"formats": PAIRS, "parts": 2}
FILES = ["a.jsonl", "a.json", "a.csv", "a.parquet"]
TEXTS: list[dict[str, Any]] = [
    {"prompt": f"The sky {i} is", "chosen": " blue.", "rejected": " green.", "category": i} for i in range(2)
]
CHATS: list[dict[str, Any]] = [
    {"prompt": chat("a", system="s"), "chosen": chat("", "b")[1:], "rejected": chat("", f"c {i}")[1:]} for i in range(2)
]
TOKENS: list[dict[str, Any]] = [{"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [9]}]


def in_cells(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]


def without_prompt(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in rows]


@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["texts", "chats"])
@pytest.mark.parametrize("name", FILES)
def test_an_implicit_prompt_gives_the_same_pairs(tmp_path: Path, name: str, rows: list[dict[str, Any]]) -> None:
    expected = ids_of(prepared(python_source(rows), **PAIR))
    null = [{"prompt": None, **row} for row in without_prompt(rows)]
    for given in (rows, without_prompt(rows), *([] if name == "a.csv" else [null])):
        found = prepared(written(tmp_path / name, in_cells(given) if name == "a.csv" else given), **PAIR)
        assert ids_of(found) == expected
        for chosen, rejected in found.samples:
            start = int((chosen.labels != -100).argmax())
            assert chosen.input_ids[:start].tolist() == rejected.input_ids[:start].tolist()


def test_only_the_answers_are_trained_on() -> None:
    tokenizer = small_tokenizer("chatml")
    [chosen, rejected] = prepared(python_source(without_prompt(CHATS[:1])), **PAIR).rows
    assert trained_text(tokenizer, chosen.labels.tolist()) == ["b<|im_end|>"]
    assert trained_text(tokenizer, rejected.labels.tolist()) == ["c 0<|im_end|>"]


def test_an_answer_is_all_that_follows_its_prompt() -> None:
    """As in TRL: with the line break behind the end of the turn, in both answers alike."""
    tokenizer = small_tokenizer("chatml")
    [chosen, rejected] = prepared(python_source(CHATS[:1]), **PAIR, cut=Cut()).rows
    assert trained_text(tokenizer, chosen.labels.tolist()) == ["b<|im_end|>\n"]
    assert trained_text(tokenizer, rejected.labels.tolist()) == ["c 0<|im_end|>\n"]
    turns = [{**CHATS[0], "chosen": chat("", "b", "c", "d")[1:]}]
    found = prepared(python_source(turns), **PAIR, cut=Cut())
    assert trained_text(tokenizer, found.rows[0].labels.tolist())[0].startswith("b<|im_end|>\n<|im_start|>user\nc")
    assert not found.account.cut.count


def test_tokens_as_trl_stores_them(tmp_path: Path) -> None:
    for name in FILES:
        found = prepared(written(tmp_path / name, in_cells(TOKENS) if name == "a.csv" else TOKENS), **PAIR)
        assert ids_of(found) == [[5, 6, 7, 8], [5, 6, 9]]
        assert [row.labels.tolist() for row in found.rows] == [[-100, -100, 7, 8], [-100, -100, 9]]


def test_labelled_answers() -> None:
    rows = [{"prompt": "a", "completion": "b", "label": good} for good in (True, False)]
    rows += [{"prompt_ids": [5], "completion_ids": [7], "label": 0}]
    rows += [{"prompt": chat("a"), "completion": chat("", "b")[1:], "label": True}]
    found = prepared(python_source(rows), formats=LABELLED)
    assert found.values == (1.0, -1.0, -1.0, 1.0)
    assert ids_of(found)[2] == [5, 7]


# What TRL's extract_prompt (version 1.16) takes as the prompt of these.
@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky", "The sky is blue.", "The sk"),
        ("a  b", "a  c", "a "),
        ("ab", "ac", "a"),
        ([1, 2, 3], [1, 2, 4], [1, 2]),
        ([1, 2], [1, 2, 3, 4], [1]),
    ],
)
def test_the_prompt_is_that_of_trl(chosen: Any, rejected: Any, prompt: Any) -> None:
    assert chosen[: shared_prompt(chosen, rejected)] == prompt
    assert rejected[: shared_prompt(rejected, chosen)] == prompt


SAME = "are equal, so there is nothing to prefer."
NO_PROMPT = "do not begin alike, so there is no prompt; give it as 'prompt'."
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, f"'chosen' and 'rejected' {SAME}"),
    ({"chosen": chat("a", "b"), "rejected": chat("a", "b")}, f"'chosen' and 'rejected' {SAME}"),
    ({"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [2]}, f"'chosen_ids' and 'rejected_ids' {SAME}"),
    ({"prompt_ids": [1], "chosen_ids": [], "rejected_ids": [2]}, "'chosen_ids' is an empty list; give at least one"),
    ({"prompt": "a", "chosen": "b", "rejected": ""}, "'rejected' is empty, so there is nothing to train on"),
    ({"prompt": "a", "chosen": " \n", "rejected": "b"}, "'chosen' is empty, so there is nothing to train on"),
    ({"chosen": "The sky ", "rejected": "The sky is"}, "'chosen' is empty, so there is nothing to train on"),
    ({"chosen": chat("a", ""), "rejected": chat("a", "b")}, "'chosen' is empty, so there is nothing to train on"),
    ({"chosen": "b", "rejected": "c"}, f"'chosen' and 'rejected' {NO_PROMPT}"),
    ({"chosen": chat("a", "b"), "rejected": chat("c", "b")}, f"'chosen' and 'rejected' {NO_PROMPT}"),
    (
        {"question": "a", "chosen": "the b", "rejected": "the c"},
        "the row has no 'prompt'; rename 'question' to 'prompt'",
    ),
    ({"prompt": "a", "chosen": "b", "rejected": None}, "'rejected' is null, but must be a string or a list"),
    ({"prompt": "a", "chosen": "b"}, "the row fits no format: its keys are 'prompt', 'chosen', but the formats need"),
    ({"chosen": chat("a", "b"), "rejected": "c"}, "'chosen' is a list and 'rejected' a string, but both must be"),
    ({"prompt": "a", "chosen": chat("a", "b"), "rejected": chat("a", "c")}, "'prompt' is a string, but 'chosen' and"),
    ({"prompt": chat("a"), "chosen": chat("b"), "rejected": chat("c")}, "'chosen' has no message of the assistant"),
    ({"chosen": [*chat("a"), *chat("b")], "rejected": chat("a", "c")}, "'chosen' has no message of the assistant"),
]


@pytest.mark.parametrize(("row", "words"), BAD, ids=range(len(BAD)))
def test_rows_without_a_pair_are_refused(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    path = written(tmp_path / "a.jsonl", [TEXTS[0], row])
    assert refused(path, **PAIR).startswith(f"{path}, line 2: {words}")
    assert len(prepared(path, **PAIR, skip_bad_rows=True).samples) == 1


@pytest.mark.parametrize("label", [None, "maybe", 2, []])
def test_labels_that_are_none(label: Any) -> None:
    with pytest.raises(UserError, match="'label'"):
        LABELLED.read({"prompt": "a", "completion": "b", "label": label})
