"""Rows that are long, numerous or oddly named: time and memory are bounded, and errors name the line."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from support.data import chat, small_tokenizer, write_jsonl

from wgpu_lora.data import Tokenizer, parse_example, read_jsonl, tokenize_example, tokenize_source, training_data
from wgpu_lora.errors import UserError
from wgpu_lora.tokenizer import conversation_rows
from wgpu_lora.tokenizer.chat_template import GIVEN

SHORT = {"text": "the sky is blue"}
LONG = b'{"text":"' + b"a" * (17 << 20) + b'"}'


@pytest.mark.parametrize("line", [LONG, b" " * (17 << 20), LONG + b"\n" + b"x" * (20 << 20)])
def test_a_line_that_is_too_long_is_not_read(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(json.dumps(SHORT).encode() + b"\n" + line)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="line 2: longer than 16 MiB; split the row"):
            list(read_jsonl(path))
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()


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
        monkeypatch.setattr(conversation_rows.ConversationRows, "_by_prefix", lambda *_: None)
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
