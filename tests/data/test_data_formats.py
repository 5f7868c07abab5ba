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
from support.data import chat, small_tokenizer, write_jsonl
from support.hostile import memory_below

from wgpu_lora.data import (
    Tokenizer,
    parse_example,
    read_examples,
    read_jsonl,
    tokenize_example,
    tokenize_source,
    training_data,
)
from wgpu_lora.data.row_files import file_source
from wgpu_lora.errors import UserError
from wgpu_lora.tokenizer import conversation_rows
from wgpu_lora.tokenizer.chat_template import GIVEN
from wgpu_lora.tokenizer.examples import Alpaca, Completion, Conversation, Text, Tokens

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
    assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert CALL["function"]["arguments"] == '{"a": 1}', "the row itself is left alone"
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
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, "both must be strings"),
        ({"instruction": "a", "output": 3}, "'output' is a number"),
        ({"messages": []}, "'messages' is an empty list"),
        ({"messages": "Hi"}, "'messages' is a string"),
        ({"messages": ["Hi"]}, r"'messages\[0\]' is a string"),
        ({"messages": [{"role": "bot", "content": ""}]}, "has the role 'bot'.*; write 'assistant'"),
        ({"prompt": "a", "response": "b"}, "; rename 'response' to 'completion'"),
        ({"instruction": "a", "Answer": "b"}, "; rename 'Answer' to 'output'"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "; these are preferences; rename 'chosen' to 'completion' to train on the chosen",
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
    monkeypatch.setattr("wgpu_lora.tokenizer.tokenizer.MAX_TEXT", 1 << 16)
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
    found = tokenize_source(write_jsonl(tmp_path / "a.jsonl", row), small_tokenizer("chatml"), max_length=64)
    assert len(found.rows) == 1
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ " + name + " }}"
    if name.isidentifier() and name not in ("class", "self", "loop", "caller", "varargs"):
        backend = small_tokenizer()._backend
        text = Tokenizer(backend, chat_templates={"default": source}).render(chat("Hi"), variables={name: "x"})
        assert text == "Hix"


@pytest.mark.parametrize("name", GIVEN)
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
