"""The process of a tokenizer and its templates: replaced when it ends, and reads what the library alone would."""

from __future__ import annotations

import datetime
import functools
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from support.rows.data import (
    FIXTURES,
    NAMED,
    TEMPLATES,
    backend_json,
    chat,
    small_tokenizer,
    template_source,
    write_jsonl,
)
from support.rows.tokenizers import PIPELINES, document

from wgpu_lora.data import Tokenizer, parse_example, tokenize_source
from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer import chat_template, tokenizer_process
from wgpu_lora.formats.tokenizer.examples import Completion, Conversation
from wgpu_lora.formats.tokenizer.label_mask import tokenize_examples
from wgpu_lora.formats.tokenizer.local_tokenizer import LocalTokenizer
from wgpu_lora.formats.tokenizer.tokenizer_json import TokenizerError
from wgpu_lora.formats.tokenizer.tokenizer_process import TokenizerProcess
from wgpu_lora.processes.child_process import ChildEnded

TEXT = json.dumps(document("gpt2"))
BOMB = "{% for m in messages %}{{ m.content }}{% if 'boom' in m.content %}{{ 'a' * 10 ** 10 }}{% endif %}{% endfor %}"


def pid_of(process: TokenizerProcess) -> int:
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
    results: dict[int, list[list[int]]] = {}

    def ask(number: int) -> None:
        results[number] = [process.call("encode", [text])[0] for text in texts[number::4]]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[number] == expected[number::4] for number in range(4))


def test_what_it_does_not_take_is_a_sentence() -> None:
    tokenizer = Tokenizer(TokenizerProcess(TEXT))
    for ask, argument, words in (
        (tokenizer.encode, "half a character: \ud800", "failed on"),
        (tokenizer.encode, "é" * (3 << 19), "more than 2 MiB: split it"),
        (tokenizer.decode, [-1], "cannot decode"),
        (tokenizer.decode, [2**40], "cannot decode"),
        (TokenizerProcess, '{"model": 1}', "no model"),
    ):
        with pytest.raises((UserError, TokenizerError), match=words):
            ask(argument)
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
    actual, here = (
        list(tokenize_examples(EXAMPLES, backend, *options)) for backend in (child, small_tokenizer(template))
    )
    for first, other in zip(actual[:-2], here[:-2], strict=True):
        assert first == other or (str(first) == str(other) and isinstance(other, UserError))
    assert "nested too deeply" in str(actual[-2])
    assert isinstance(here[-2], UserError)
    assert "failed on" in str(actual[-1])


# -- published tokenizers ----------------------------------------------------------------------------------------------

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
    tokenizer, here = Tokenizer.load(tmp_path), LocalTokenizer.open(json.dumps(document(name)))
    assert tokenizer.encode_all(TEXTS, True) == here.encode(TEXTS, True)
    for text in TEXTS:
        assert tokenizer.encode_with_offsets(text) == Tokenizer(here).encode_with_offsets(text)
    ids = tokenizer.encode(TEXTS[0])
    assert tokenizer.decode(ids) == here.decode(ids, True)
    assert tokenizer.files()["tokenizer.json"] == here.to_json()
    assert (tokenizer.token_id("<s>"), tokenizer.token_id("nothing")) == (1, None)
    assert tokenizer.vocab_size == here.info.vocab_size
    assert tokenizer.special_texts == ("<unk>", "<s>", "</s>")


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
    tokenizer = Tokenizer.load(tmp_path)
    assert "dropout" in tokenizer.notes[0]
    text = "the other thing that the others think " * 20
    assert len({tuple(tokenizer.encode(text)) for _ in range(5)}) == 1
    assert json.loads(tokenizer.files()["tokenizer.json"])["model"]["dropout"] is None


# -- chat templates ----------------------------------------------------------------------------------------------------

GOLDEN = json.loads((FIXTURES / "templates.json").read_text(encoding="utf-8"))
CASES = [(name, case) for name in TEMPLATES for case in GOLDEN["conversations"]]
USER = [{"role": "user", "content": "Hi"}]
DATE = {chat_template.DATE: "2024-07-26"}
SPECIAL = {"special_tokens": NAMED}
_child = functools.cache(lambda: TokenizerProcess(backend_json()))


@pytest.fixture(autouse=True)
def _frozen_date(monkeypatch):
    class Frozen(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime(2024, 7, 26)

    monkeypatch.setattr(chat_template, "datetime", Frozen)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_renders_as_transformers_does(name, case):
    arguments, golden = dict(GOLDEN["conversations"][case]), GOLDEN["rendered"][name][case]
    arguments["variables"] = NAMED | {
        key: arguments.pop(key) for key in arguments.keys() - set(chat_template.STANDARD_VARIABLES)
    }
    if golden is None:
        with pytest.raises(UserError, match="chat template"):
            chat_template.render(template_source(name), **arguments)
        return
    text, spans = chat_template.render(template_source(name), **arguments)
    assert text == golden["text"]
    assert [list(span) for span in spans] == golden["spans"]
    arguments["variables"] = {**DATE, **arguments["variables"]}
    child = Tokenizer(_child(), chat_templates={"default": template_source(name)})
    assert child.render_with_spans(**arguments) == (text, spans)


def test_the_golden_file_is_not_empty():
    rendered = [(name, case) for name, case in CASES if GOLDEN["rendered"][name][case] is not None]
    assert len(rendered) > len(CASES) // 2
    assert GOLDEN["rendered"]["strict"]["wrong_order"] is None
    assert len(GOLDEN["rendered"]["chatml_marked"]["four"]["spans"]) == 2
    assert "26 Jul 2024" in GOLDEN["rendered"]["headers"]["two"]["text"]


@pytest.mark.reference
def test_the_golden_file_is_what_transformers_renders_today():
    pytest.importorskip("transformers", reason="transformers is not installed: make test-reference does that")
    from scripts.golden.templates import render_with_transformers

    assert render_with_transformers(GOLDEN["conversations"]) == GOLDEN["rendered"]


def test_one_rendering_after_another_keeps_its_spans_apart():
    source = template_source("chatml_marked")
    messages = [*USER, {"role": "assistant", "content": "Hello"}]
    for _ in range(2):
        text, [(start, end)] = chat_template.render(source, messages)
        assert text[start:end] == "Hello<|im_end|>"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "cannot be compiled .*line 1"),
        ("{{ raise_exception('only German') }}", "refuses this conversation: only German"),
        ("{{ messages[3].content }}", "lacks"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% for i in range(10 ** 9) %}a{% endfor %}", "Range too big"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses|lacks"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_bad_template_is_told_in_words(source, words):
    with pytest.raises(UserError, match=words):
        chat_template.render(source, USER)


def test_null_fields_are_left_out_and_reasoning_has_every_name():
    source = "{% for key in messages[0] %}{{ key }} {% endfor %}{{ messages[0].reasoning_content }}"
    message = {"role": "assistant", "content": "a", "tool_calls": None, "reasoning": "why"}
    assert chat_template.render(source, [message])[0] == "thinking role content reasoning reasoning_content why"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ c.partition('>')[2] }}{{ c.rpartition('>')[0] }}{{ c.rfind('>') }}{{ c.rindex('b') }}", "x y<b21"),
        ("{{ c.center(9) }}{{ c.ljust(7) }}|{{ '7'.zfill(3) }}{{ 'ß'.casefold() }}", "  <b>x y <b>x y |007ss"),
        ("{{ '7'.isdecimal() }}{{ '7'.isnumeric() }}{{ {'a': 1}.copy() }}", "TrueTrue{'a': 1}"),
        ("{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2, 3] | slice(2) | list }}", "[[1, 2], [3]][[1, 2], [3]]"),
        (
            "{{ 'a' | center(3) }}{{ 'a b c d e f g h i' | truncate(9, true) }}{{ 'a b' | wordwrap(1) }}",
            " a a b c ...a\nb",
        ),
        (
            "{{ messages[0] | attr('missing') }}{{ c | striptags }}{{ [1] | pprint }}{{ c | urlize }}",
            "x y[1]&lt;b&gt;x y",
        ),
        ("{{ {'a': [1, 'é<']} | tojson(indent=2) }}", '{\n  "a": [\n    1,\n    "é<"\n  ]\n}'),
        ("{{ strftime_now('%d %b %Y') }}{{ bos_token }}", "26 Jul 2024<s>"),
    ],
)
def test_methods_and_filters_of_jinja2_work_in_the_child(source, text):
    tokenizer = Tokenizer(_child(), chat_templates={"default": "{% set c = messages[0].content %}" + source}, **SPECIAL)
    assert tokenizer.render([{"role": "user", "content": "<b>x y"}], variables=DATE) == text


@pytest.mark.parametrize("name", ["random", "lipsum"])
def test_what_is_random_is_no_part_of_a_template(name):
    with pytest.raises(UserError, match=r"cannot be compiled|refuses|lacks"):
        chat_template.render("{{ [1, 2] | random }}" if name == "random" else "{{ lipsum() }}", USER)
