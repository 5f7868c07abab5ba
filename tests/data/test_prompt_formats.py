"""Rows that are prompts: how they are read, rendered and kept for rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rows.sources import write_source

from wgpu_lora.data import Tokenizer, tokenize_source
from wgpu_lora.data.example_formats import PROMPTS
from wgpu_lora.data.tokenized_data import KEEP_END, Cut
from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_MODEL
from wgpu_lora.formats.tokenizer.examples import Prompt, Tokens
from wgpu_lora.infer.prompts import chat_prompt

ASKED = [{"role": "user", "content": "Add two numbers."}]


def test_rows_are_read_with_all_their_columns() -> None:
    ids = PROMPTS.read({"prompt_ids": [1, 2], "answer": "x"})
    assert ids.examples == (Tokens([1, 2], [1, 2]),)
    assert ids.columns == {"prompt_ids": [1, 2], "answer": "x"}
    assert PROMPTS.read({"prompt": "2 + 2 ="}).examples == (Prompt("2 + 2 ="),)
    answered = [*ASKED, {"role": "assistant", "content": "a + b"}]
    for row in ({"prompt": ASKED}, {"messages": answered}, {"prompt": answered}):
        assert PROMPTS.read(row).examples == (Prompt(ASKED),)
    with pytest.raises(UserError, match=r"no message before the assistant's"):
        PROMPTS.read({"messages": [{"role": "assistant", "content": "hello"}]})
    with pytest.raises(UserError, match=r"the formats need"):
        PROMPTS.read({"text": "hello"})


def test_prompts_are_worded_as_in_generation(tmp_path: Path) -> None:
    """Messages with the header of the answer, texts as they are; a prompt that is too long keeps its end."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert tokenizer is not None
    path = write_source(
        tmp_path / "rows.jsonl", [{"prompt": ASKED, "check": "c"}, {"prompt": "def add(a, b):", "check": "d"}]
    )
    data = tokenize_source(path, tokenizer, max_length=512, formats=PROMPTS, cut=Cut(mode=KEEP_END))
    chat, text = (row.input_ids.tolist() for row in data.rows)
    assert chat == chat_prompt(tokenizer, ASKED)
    assert text == chat_prompt(tokenizer, "def add(a, b):", prompt_format="text")
    assert [row["check"] for row in data.columns] == ["c", "d"]
    assert "tokens of prompts" in data.summary()
    short = tokenize_source(path, tokenizer, max_length=4, formats=PROMPTS, cut=Cut(mode=KEEP_END))
    assert short.rows[0].input_ids.tolist() == chat[-4:]
