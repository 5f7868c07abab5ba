"""Writes tests/fixtures/data/templates.json: the fixture chat templates as transformers renders them.

    python scripts/make_template_fixtures.py

Needs transformers (the `reference` extra). The test that carries the mark `reference` renders all of it again.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import jinja2

TESTS = Path(__file__).parent.parent / "tests"
FIXTURES = TESTS / "fixtures" / "data"
sys.path.insert(0, str(TESTS))
TODAY = datetime.datetime(2024, 7, 26)

_TWO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Hello, größer & <b>!\n"}]
_FOUR = [
    *_TWO,
    {"role": "user", "content": "And?\n\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo."},
]
_SYSTEM = [{"role": "system", "content": " Be brief. "}, *_FOUR]
_REASONED = [_TWO[0], {"role": "assistant", "content": "Yes", "thinking": "well", "tool_calls": None}]
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "tags": ["<a>", None]}}}
_TOOLS = [{"type": "function", "function": {"name": "weather", "description": 'It\'s "here" & now', "parameters": {}}}]
_CALLED = [
    _TWO[0],
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "content": "12 °C"},
    {"role": "assistant", "content": "Cold."},
]

# What each case hands to the template, beside the messages.
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "two": {"messages": _TWO},
    "question": {"messages": _TWO[:1], "add_generation_prompt": True},
    "question_without_thinking": {"messages": _TWO[:1], "add_generation_prompt": True, "enable_thinking": False},
    "four": {"messages": _FOUR},
    "system": {"messages": _SYSTEM, "date_string": "1 Jan 2000"},
    "reasoned": {"messages": _REASONED},
    "tools": {"messages": _CALLED, "tools": _TOOLS},
    "wrong_order": {"messages": _FOUR[1:]},
}


class _Frozen(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return TODAY


def render_with_transformers() -> dict[str, dict[str, Any]]:
    """{template: {case: {"text": ..., "spans": [[start, end], ...]}, or null where the template fails}}"""
    from support.data import NAMED, backend_json
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = _Frozen  # type: ignore[misc]
    result: dict[str, dict[str, Any]] = {}
    for path in sorted(FIXTURES.glob("*.jinja")):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend_json()), **NAMED)
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        result[path.stem] = {case: _render(tokenizer, given) for case, given in CONVERSATIONS.items()}
    return result


def _render(tokenizer: Any, given: dict[str, Any]) -> dict[str, Any] | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rest = {key: value for key, value in given.items() if key != "messages"}
    try:
        text = tokenizer.apply_chat_template(given["messages"], tokenize=False, **rest)
        # apply_chat_template drops null fields and gives spans only as tokens; this is what it calls for them.
        messages = [{k: v for k, v in message.items() if v is not None} for message in given["messages"]]
        rendered: Any = render_jinja_template(
            [messages],
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
            **rest,
        )
    except (jinja2.TemplateError, TypeError):
        return None
    texts, spans = rendered
    assert texts == [text]
    return {"text": text, "spans": [list(span) for span in spans[0]]}


if __name__ == "__main__":
    out = FIXTURES / "templates.json"
    golden = {"conversations": CONVERSATIONS, "rendered": render_with_transformers()}
    out.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {out}")
