"""The process of a tokenizer: replaced when it ends, and what it does not take is a sentence."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from support.data import NAMED, backend_json, chat, small_tokenizer, template_source, write_jsonl
from support.tokenizers import PIPELINES, document

from wgpu_lora.child_process import ChildEnded
from wgpu_lora.data import Tokenizer, parse_example, tokenize_source
from wgpu_lora.errors import UserError
from wgpu_lora.tokenizer import tokenizer_process
from wgpu_lora.tokenizer.examples import Completion, Conversation
from wgpu_lora.tokenizer.label_mask import tokenize_examples
from wgpu_lora.tokenizer.local_tokenizer import LocalTokenizer
from wgpu_lora.tokenizer.tokenizer_json import TokenizerError
from wgpu_lora.tokenizer.tokenizer_process import TokenizerProcess

TEXT = json.dumps(document("gpt2"))
BOMB = "{% for m in messages %}{{ m.content }}{% if 'boom' in m.content %}{{ 'a' * 10 ** 10 }}{% endif %}{% endfor %}"


def pid_of(process: TokenizerProcess) -> int:
    assert process._child is not None
    return process._child.popen.pid


def test_one_that_was_killed_is_replaced() -> None:
    process = TokenizerProcess(TEXT)
    ids, first = process.call("encode", ["the hat"]), pid_of(process)
    os.kill(first, getattr(signal, "SIGKILL", signal.SIGTERM))
    with pytest.raises(ChildEnded, match="or crashed"):
        process.call("encode", ["the hat"])
    assert process.call("encode", ["the hat"]) == ids
    assert pid_of(process) != first


def test_threads_ask_one_after_the_other() -> None:
    process = TokenizerProcess(TEXT)
    texts = [f"the hat {i} " * 20 for i in range(40)]
    expected = process.call("encode", texts)
    found: dict[int, list[list[int]]] = {}

    def ask(number: int) -> None:
        found[number] = [process.call("encode", [text])[0] for text in texts[number::4]]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[number] == expected[number::4] for number in range(4))


def test_what_it_does_not_take_is_a_sentence() -> None:
    tokenizer = Tokenizer(TokenizerProcess(TEXT))
    for ask, given, words in (
        (tokenizer.encode, "half a character: \ud800", "failed on"),
        (tokenizer.encode, "é" * (3 << 19), "more than 2 MiB: split it"),
        (tokenizer.decode, [-1], "cannot decode"),
        (tokenizer.decode, [2**40], "cannot decode"),
        (TokenizerProcess, '{"model": 1}', "no model"),
    ):
        with pytest.raises((UserError, TokenizerError), match=words):
            ask(given)
    assert tokenizer.decode([2**31]) == ""


@pytest.mark.parametrize("skip", [False, True])
def test_a_row_that_exceeds_a_limit_ends_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip: bool
) -> None:
    """Each such row would cost seconds."""
    monkeypatch.setattr(tokenizer_process, "LIMITS", replace(tokenizer_process.LIMITS, memory=200 << 20))
    tokenizer = Tokenizer(TokenizerProcess(TEXT), chat_templates={"default": BOMB})
    rows = [{"messages": chat("Hi", answer)} for answer in ("Hello", "boom", "Hello")]
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: .* 200 MiB of memory, or crashed"):
        tokenize_source(write_jsonl(tmp_path / "a.jsonl", *rows), tokenizer, max_length=64, skip_bad_rows=skip)
    assert len(tokenize_source(write_jsonl(tmp_path / "b.jsonl", rows[0]), tokenizer, max_length=64).rows) == 1


DEEP: list[object] = []
for _ in range(3000):
    DEEP = [DEEP]
EXAMPLES = [
    *(
        parse_example(row)
        for row in (
            {"text": "the sky is blue"},
            {"messages": chat("Hi", "Hello", "And the sky?", "blue")},
            {"messages": [{**message, "reasoning": "hm"} for message in chat("Hi", "Hello", "And?", "No")]},
            {"messages": chat("Hi", "Hello"), "chat_template_kwargs": {"template_date": "2020-01-02"}},
            {"prompt": "a", "completion": ""},
            {"input_ids": [1, 2, 3]},
            {"instruction": "say", "output": "the answer"},
        )
    ),
    Conversation(chat("Hi", "Hello"), frozenset({1}), [{"function": {"name": "deep", "parameters": DEEP}}]),
    Completion("half a character: \ud800", "a"),
]


@pytest.mark.parametrize("template", [None, "chatml", "chatml_marked", "thinking", "headers"])
@pytest.mark.parametrize("completion_only_loss", [True, False])
def test_examples_are_the_same_in_the_child(template: str | None, completion_only_loss: bool) -> None:
    templates = {} if template is None else {"default": template_source(template)}
    child = Tokenizer(TokenizerProcess(backend_json()), special_tokens=NAMED, chat_templates=templates)
    options = completion_only_loss, {"template_date": "2024-07-26"}
    found, here = (list(tokenize_examples(EXAMPLES, one, *options)) for one in (child, small_tokenizer(template)))
    for one, other in zip(found[:-2], here[:-2], strict=True):
        assert one == other or (str(one) == str(other) and isinstance(other, UserError))
    assert "nested too deeply" in str(found[-2])
    assert isinstance(here[-2], UserError)
    assert "failed on" in str(found[-1])


# -- pipelines that published tokenizers have are taken, and read texts as the library alone does ----------------------

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
