"""Chat templates render as in transformers, and fail with a sentence."""

import datetime
import functools
import importlib.util
import json

import pytest
from support import SCRIPTS
from support.data import FIXTURES, NAMED, TEMPLATES, backend_json, template_source

from wgpu_lora.data import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.tokenizer import chat_template
from wgpu_lora.tokenizer.tokenizer_process import TokenizerProcess

GOLDEN = json.loads((FIXTURES / "templates.json").read_text(encoding="utf-8"))
CASES = [(name, case) for name in TEMPLATES for case in GOLDEN["conversations"]]
USER = [{"role": "user", "content": "Hi"}]
DATE = {chat_template.DATE: "2024-07-26"}
SPECIAL = {"special_tokens": NAMED}
_child = functools.cache(lambda: TokenizerProcess(backend_json()))


def _script():
    path = SCRIPTS / "make_template_fixtures.py"
    spec = importlib.util.spec_from_file_location("make_template_fixtures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _frozen_date(monkeypatch):
    class Frozen(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime(2024, 7, 26)

    monkeypatch.setattr(chat_template, "datetime", Frozen)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_renders_as_transformers_does(name, case):
    given, golden = dict(GOLDEN["conversations"][case]), GOLDEN["rendered"][name][case]
    given["variables"] = NAMED | {key: given.pop(key) for key in given.keys() - set(chat_template.GIVEN)}
    if golden is None:
        with pytest.raises(UserError, match="chat template"):
            chat_template.render(template_source(name), **given)
        return
    text, spans = chat_template.render(template_source(name), **given)
    assert text == golden["text"]
    assert [list(span) for span in spans] == golden["spans"]
    given["variables"] = {**DATE, **given["variables"]}
    child = Tokenizer(_child(), chat_templates={"default": template_source(name)})
    assert child.render_with_spans(**given) == (text, spans)


def test_the_golden_file_is_not_empty():
    rendered = [(name, case) for name, case in CASES if GOLDEN["rendered"][name][case] is not None]
    assert len(rendered) > len(CASES) // 2
    assert GOLDEN["rendered"]["strict"]["wrong_order"] is None
    assert len(GOLDEN["rendered"]["chatml_marked"]["four"]["spans"]) == 2
    assert "26 Jul 2024" in GOLDEN["rendered"]["headers"]["two"]["text"]


@pytest.mark.reference
def test_the_golden_file_is_what_transformers_renders_today():
    pytest.importorskip("transformers", reason="transformers is not installed: make test-reference does that")
    assert _script().render_with_transformers(GOLDEN["conversations"]) == GOLDEN["rendered"]


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
