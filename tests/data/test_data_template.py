"""Chat templates render as in transformers, and fail with a sentence."""

import datetime
import importlib.util
import json

import pytest
from support import SCRIPTS
from support.data import FIXTURES, NAMED, TEMPLATES, template_source

from wgpu_lora.data import template
from wgpu_lora.errors import UserError

GOLDEN = json.loads((FIXTURES / "templates.json").read_text(encoding="utf-8"))
CASES = [(name, case) for name in TEMPLATES for case in GOLDEN["conversations"]]
USER = [{"role": "user", "content": "Hi"}]


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

    monkeypatch.setattr(template, "datetime", Frozen)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_renders_as_transformers_does(name, case):
    given, golden = dict(GOLDEN["conversations"][case]), GOLDEN["rendered"][name][case]
    given["variables"] = NAMED | {key: given.pop(key) for key in given.keys() - set(template.GIVEN)}
    if golden is None:
        with pytest.raises(UserError, match="chat template"):
            template.render(template_source(name), **given)
        return
    text, spans = template.render(template_source(name), **given)
    assert text == golden["text"]
    assert [list(span) for span in spans] == golden["spans"]


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
        text, [(start, end)] = template.render(source, messages)
        assert text[start:end] == "Hello<|im_end|>"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "cannot be compiled .*line 1"),
        ("{{ raise_exception('only German') }}", "refuses this conversation: only German"),
        ("{{ messages[3].content }}", "lacks"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% for i in range(10 ** 9) %}a{% endfor %}", "too large a number"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}aaaa{% endfor %}{% endfor %}", "computation limit"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses|lacks"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_bad_template_is_told_in_words(source, words):
    with pytest.raises(UserError, match=words):
        template.render(source, USER)


def test_null_fields_are_left_out_and_reasoning_has_every_name():
    source = "{% for key in messages[0] %}{{ key }} {% endfor %}{{ messages[0].reasoning_content }}"
    message = {"role": "assistant", "content": "a", "tool_calls": None, "reasoning": "why"}
    assert template.render(source, [message])[0] == "thinking role content reasoning reasoning_content why"
