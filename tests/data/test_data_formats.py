"""Reading lines of a file as validated examples, and the errors about bad lines."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows.data import chat, small_tokenizer, trained_text, write_jsonl
from support.rows.hostile import memory_below
from support.rows.sources import ids_of, prepared, refused, write_source

from wgpu_lora.data import (
    Tokenizer,
    parse_example,
    python_source,
    read_examples,
    read_jsonl,
    tokenize_example,
    tokenize_source,
    training_data,
)
from wgpu_lora.data.preference_formats import LABELLED, PAIRS, shared_prompt
from wgpu_lora.data.row_files import file_source
from wgpu_lora.data.tokenized_data import Cut
from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer import conversation_rows
from wgpu_lora.formats.tokenizer.chat_template import STANDARD_VARIABLES
from wgpu_lora.formats.tokenizer.examples import Alpaca, Completion, Conversation, Text, Tokens

CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_lines_bom_and_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "\xc3\xb6"}\r\n\n   \n{"text": "\\u2028 \\ud83e\\udd9c"}')
    assert list(read_jsonl(path)) == [(1, {"text": "ö"}), (4, {"text": "\u2028 🦜"})]


def test_reading_is_lazy(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{')
    lines = read_jsonl(path)
    assert next(lines) == (1, {"text": "a"})
    with pytest.raises(UserError, match="line 2: not JSON"):
        next(lines)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{'text': 1}", "not JSON: expecting property name .*at character 2;"),
        (b'[{"text": "a"}]', "it is a list"),
        (b'"text"', "it is a string"),
        (b'{"text": "\xff"}', "not valid UTF-8 .byte 11"),
        (b'{"text": "a", "text": "b"}', "key 'text' is repeated"),
        (b'{"a": {"b": 1, "b": 2}}', "key 'b' is repeated"),
        (b'{"text": "\\ud83e"}', "surrogate"),
        (b'{"a": NaN}', "NaN is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "line 2: "),
        (b"[" * 100000, "nested too deeply"),
        (b'{"text": "a"} {"text": "b"}', "several JSON objects in one line"),
        (b'{"text": "a"},', "a comma after the object; remove it"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b"\n")
    with pytest.raises(UserError, match=words) as raised:
        list(read_jsonl(path))
    assert f"{path}, line 2: " in str(raised.value)


def test_files_without_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    for content in (b"", b"\n \n", b"\xef\xbb\xbf\n"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is empty"):
            list(read_jsonl(path))
    for place in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            list(read_jsonl(place))


TWO, ALL_FOUR = chat("Hi", "Hello"), chat("Hi", "Hello", "And?", "So.")
SHAREGPT = [
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello"},
    {"role": "user", "content": "And?"},
    {"from": "assistant", "value": "So."},
]


@pytest.mark.parametrize(
    ("row", "example"),
    [
        ({"text": "a"}, Text("a")),
        ({"prompt": "a", "completion": "b", "id": 3}, Completion("a", "b")),
        ({"instruction": "a", "output": "b"}, Alpaca("a", "", "b", "")),
        ({"instruction": "a", "input": "i", "output": "b", "text": "t"}, Alpaca("a", "i", "b", "")),
        ({"messages": TWO, "prompt": "Hi"}, Conversation(TWO, frozenset({1}))),
        ({"input_ids": [1, 2]}, Tokens([1, 2], [1, 2])),
        ({"input_ids": [1, 2], "labels": [-100, 7], "attention_mask": [1, 1]}, Tokens([1, 2], [-100, 7])),
        (
            {"system": "S", "conversations": SHAREGPT},
            Conversation(chat("Hi", "Hello", "And?", "So.", system="S"), frozenset({2, 4})),
        ),
        (  # the completion alone is trained
            {"prompt": ALL_FOUR[:3], "completion": ALL_FOUR[3:], "chat_template_kwargs": {"a": 1}},
            Conversation(ALL_FOUR, frozenset({3}), template_kwargs={"a": 1}),
        ),
    ],
)
def test_each_format(row, example):
    assert parse_example(row) == example


def test_what_is_made_of_messages():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "a", "weight": 0},
        {"role": "assistant", "content": "b", "weight": 1},
    ]
    example = parse_example({"messages": messages, "tools": '[{"name": "f"}]'})
    assert isinstance(example, Conversation)
    assert example.messages[0]["content"] == "one two"
    assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert example.trained == {1, 4}
    assert example.tools == [{"name": "f"}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "a", "answer": "b"}, "fits no format: its keys are 'question', 'answer', but .*messages"),
        ({}, "its keys are none"),
        ({"prompt": "a"}, "fits no format"),
        ({"text": None}, "'text' is null"),
        ({"text": ["a"]}, "'text' is a list"),
        ({"prompt": "a", "completion": [{"role": "user", "content": "b"}]}, "both must be strings"),
        ({"instruction": "a", "output": 3}, "'output' is a number"),
        ({"messages": []}, "'messages' is an empty list"),
        ({"messages": "Hi"}, "'messages' is a string"),
        ({"messages": ["Hi"]}, r"'messages\[0\]' is a string"),
        ({"messages": [{"role": "bot", "content": ""}]}, "has the role 'bot'.*; write 'assistant'"),
        ({"prompt": "a", "response": "b"}, "; rename 'response' to 'completion'"),
        ({"instruction": "a", "Answer": "b"}, "; rename 'Answer' to 'output'"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "; these are preferences; rename 'chosen' to 'completion' and remove 'rejected' to train on the chosen",
        ),
        ({"messages": [{"role": ["user"], "content": ""}]}, "has the role"),
        ({"messages": [{"role": "user"}]}, "has null for content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content part"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": "x"}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "content": "", "weight": 0.5}]}, "weight 0.5"),
        ({"messages": chat("a"), "tools": "nonsense"}, "'tools' is a string that is not valid JSON"),
        ({"messages": chat("a"), "tools": {"a": 1}}, "'tools' is an object"),
        ({"messages": chat("a"), "chat_template_kwargs": [1]}, "'chat_template_kwargs' is a list"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "from 'narrator'"),
        ({"conversations": [{"from": "human"}]}, r"'conversations\[0\]' has null"),
        ({"conversations": {}}, "'conversations' is an empty object"),
        ({"input_ids": [1, 2.0]}, "list of integers"),
        ({"input_ids": [True]}, "list of integers"),
        ({"input_ids": [-1]}, "'input_ids' must"),
        ({"input_ids": [2**31]}, "list of integers"),
        ({"input_ids": [1], "labels": [1, 2]}, "'labels' has 2 entries"),
        ({"input_ids": [1], "labels": [-1]}, "other than -100"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "remove the padding"),
    ],
)
def test_a_bad_row_is_told_in_words(tmp_path, row, words):
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "a"}, row)
    with pytest.raises(UserError, match=words) as raised:
        list(read_examples(file_source(path)))
    assert str(raised.value).startswith(f"{path}, line 2: ")


ROW_FIELDS = [
    "text",
    "prompt",
    "completion",
    "messages",
    "conversations",
    "instruction",
    "output",
    "input_ids",
    "labels",
]
EXTRA_FIELDS = ["input", "system", "tools", "attention_mask", "chat_template_kwargs"]
MESSAGE_FIELDS = ["role", "content", "from", "value", "tool_calls", "function", "arguments", "weight", "type", "text"]
SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
WORDS = st.sampled_from(["user", "assistant", "human", "gpt", "system", "text", "[]"])
MESSAGE = st.dictionaries(st.sampled_from(MESSAGE_FIELDS), SCALAR | WORDS | st.lists(SCALAR, max_size=2), max_size=4)
VALUE = SCALAR | WORDS | st.lists(SCALAR | MESSAGE, max_size=3) | MESSAGE
ROW = st.dictionaries(st.sampled_from(ROW_FIELDS + EXTRA_FIELDS) | st.text(max_size=3), VALUE, max_size=4)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ROW)
def test_any_object_is_an_example_or_a_user_error(row):
    before = copy.deepcopy(row)
    try:
        example = parse_example(row)
    except UserError:
        return
    assert row == before
    if isinstance(example, Conversation):
        assert all(example.messages[i]["role"] == "assistant" for i in example.trained)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(line=st.binary(max_size=30))
def test_any_bytes_are_rows_or_a_user_error(tmp_path_factory, line):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(line)
    with contextlib.suppress(UserError):
        assert all(isinstance(row, dict) for _, row in read_jsonl(path))


# -- rows that are long, numerous or oddly named -----------------------------------------------------------------------

SHORT = {"text": "the sky is blue"}
LONG = b'{"text":"' + b"a" * (17 << 20) + b'"}'


@pytest.mark.parametrize("line", [LONG, b" " * (17 << 20), LONG + b"\n" + b"x" * (20 << 20)])
def test_a_line_that_is_too_long_is_not_read(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(json.dumps(SHORT).encode() + b"\n" + line)
    with memory_below(48 << 20), pytest.raises(UserError, match="line 2: longer than 16 MiB; split the row"):
        list(read_jsonl(path))


LONG_TEXTS = {
    "text": {"text": "a" * (3 << 15)},
    "bytes": {"text": "é" * (3 << 14)},
    "completion": {"prompt": "a", "completion": "b " * (2 << 15)},
    "alpaca": {"instruction": "a", "output": "b " * (2 << 15)},
    "conversation": {"messages": chat("Hi", "b " * (2 << 15))},
    "many messages": {"messages": chat(*["b"] * 5000)},
    "turns": {"messages": chat(*["some words"] * 1000)},
}


@pytest.mark.parametrize("kind", LONG_TEXTS)
@pytest.mark.parametrize("template", ["chatml", "thinking"])
def test_a_text_that_is_too_long_is_not_tokenised(
    tmp_path: Path, kind: str, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wgpu_lora.formats.tokenizer.tokenizer.MAX_TEXT", 1 << 16)
    monkeypatch.setattr(conversation_rows, "MAX_RENDERED", 1 << 22)
    path = write_jsonl(tmp_path / "train.jsonl", SHORT, LONG_TEXTS[kind])
    with pytest.raises(UserError, match=r"line 2: .*[;:] split"):
        tokenize_source(path, small_tokenizer(template), max_length=64)


@pytest.mark.parametrize("most", ["MAX_RENDERED", "MAX_IN_ROWS"])
def test_turns_that_are_looked_for_one_by_one_are_bounded(monkeypatch: pytest.MonkeyPatch, most: str) -> None:
    example, tokenizer = parse_example({"messages": chat(*["words"] * 10)}), small_tokenizer("thinking")
    assert len(tokenize_example(example, tokenizer)) in (1, 5)
    monkeypatch.setattr(conversation_rows, most, 100)
    if most == "MAX_IN_ROWS":  # where the template makes another text of what is followed by more
        monkeypatch.setattr(conversation_rows.ConversationRows, "_spans_by_prefix", lambda *_: None)
    with pytest.raises(UserError, match=r"5 trained turns are too long for a conversation; split"):
        tokenize_example(example, tokenizer)


NAMES = ["self", "source", "template", "variables", "context", "args", "kwargs", "environment", "name", "", "a b", "é",
         "caller", "loop", "varargs", "_turn", "__class__", "bos_token", "class", "0"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_row_may_name_what_it_likes(tmp_path: Path, name: str) -> None:
    row = {"messages": chat("Hi", "Hello"), "chat_template_kwargs": {name: "x"}}
    data = tokenize_source(write_jsonl(tmp_path / "a.jsonl", row), small_tokenizer("chatml"), max_length=64)
    assert len(data.rows) == 1
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ " + name + " }}"
    if name.isidentifier() and name not in ("class", "self", "loop", "caller", "varargs"):
        backend = small_tokenizer()._backend
        text = Tokenizer(backend, chat_templates={"default": source}).render(chat("Hi"), variables={name: "x"})
        assert text == "Hix"


@pytest.mark.parametrize("name", STANDARD_VARIABLES)
def test_a_row_may_not_name_what_comes_from_itself(tmp_path: Path, name: str) -> None:
    row = {"messages": chat("Hi", "Hello"), "chat_template_kwargs": {name: 1}}
    with pytest.raises(UserError, match=f"line 2: chat_template_kwargs must not set {name}"):
        tokenize_source(write_jsonl(tmp_path / "a.jsonl", SHORT, row), small_tokenizer("chatml"), max_length=64)


@pytest.mark.parametrize("name", ["range", "namespace", "raise_exception", "strftime_now", "dict"])
def test_a_row_that_names_what_the_template_calls(tmp_path: Path, name: str) -> None:
    source = "{% set x = " + name + "(a=1) %}{{ messages[0].content }}"
    tokenizer = Tokenizer(small_tokenizer()._backend, chat_templates={"default": source})
    row = {"messages": chat("Hi", "Hello"), "chat_template_kwargs": {name: 1}}
    with pytest.raises(UserError, match="line 1: The chat template"):
        tokenize_source(write_jsonl(tmp_path / "a.jsonl", row), tokenizer, max_length=64)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_data_from_a_pipe_or_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    for path in (tmp_path / "a.jsonl", Path("/dev/zero")):
        with pytest.raises(UserError, match="not a regular file"):
            training_data(path)


# -- rows of preference training ---------------------------------------------------------------------------------------


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
    for form in (rows, without_prompt(rows), *([] if name == "a.csv" else [null])):
        data = prepared(write_source(tmp_path / name, in_cells(form) if name == "a.csv" else form), **PAIR)
        assert ids_of(data) == expected
        for chosen, rejected in data.samples:
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
    data = prepared(python_source(turns), **PAIR, cut=Cut())
    assert trained_text(tokenizer, data.rows[0].labels.tolist())[0].startswith("b<|im_end|>\n<|im_start|>user\nc")
    assert not data.account.cut.count


def test_tokens_as_trl_stores_them(tmp_path: Path) -> None:
    for name in FILES:
        data = prepared(write_source(tmp_path / name, in_cells(TOKENS) if name == "a.csv" else TOKENS), **PAIR)
        assert ids_of(data) == [[5, 6, 7, 8], [5, 6, 9]]
        assert [row.labels.tolist() for row in data.rows] == [[-100, -100, 7, 8], [-100, -100, 9]]


def test_labelled_answers() -> None:
    rows = [{"prompt": "a", "completion": "b", "label": good} for good in (True, False)]
    rows += [{"prompt_ids": [5], "completion_ids": [7], "label": 0}]
    rows += [{"prompt": chat("a"), "completion": chat("", "b")[1:], "label": True}]
    data = prepared(python_source(rows), formats=LABELLED)
    assert data.values == (1.0, -1.0, -1.0, 1.0)
    assert ids_of(data)[2] == [5, 7]


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
    (
        {"prompt": "x", "chosen": chat("a", "b"), "rejected": chat("a", "c")},
        "'prompt' is a text, but the conversations",
    ),
    ({"prompt": chat("a"), "chosen": chat("b"), "rejected": chat("c")}, "'chosen' has no message of the assistant"),
    ({"chosen": [*chat("a"), *chat("b")], "rejected": chat("a", "c")}, "'chosen' has no message of the assistant"),
]


@pytest.mark.parametrize(("row", "words"), BAD, ids=range(len(BAD)))
def test_rows_without_a_pair_are_refused(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    path = write_source(tmp_path / "a.jsonl", [TEXTS[0], row])
    assert refused(path, **PAIR).startswith(f"{path}, line 2: {words}")
    assert len(prepared(path, **PAIR, skip_bad_rows=True).samples) == 1


@pytest.mark.parametrize("label", [None, "maybe", 2, []])
def test_labels_that_are_none(label: Any) -> None:
    with pytest.raises(UserError, match="'label'"):
        LABELLED.read({"prompt": "a", "completion": "b", "label": label})
