"""Renders the conversations in tests/fixtures/data/templates.json with transformers, in every fixture chat template.

    python -m scripts.golden.templates

Edit `conversations` in that file, what each case passes to the template, and run this to bring `rendered` up to date.
Needs transformers (the `reference` extra). A test with the marker `reference` renders everything again.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import jinja2

TESTS = Path(__file__).parents[2] / "tests"
FIXTURES = TESTS / "fixtures" / "data"
sys.path.insert(0, str(TESTS))
TODAY = datetime.datetime(2024, 7, 26)


class _Frozen(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return TODAY


def render_with_transformers(conversations: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """{template: {case: {"text": ..., "spans": [[start, end], ...]}, or null where the template fails}}"""
    from support.rows.data import NAMED, backend_json
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = _Frozen  # type: ignore[misc]
    result: dict[str, dict[str, Any]] = {}
    for path in sorted(FIXTURES.glob("*.jinja")):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend_json()), **NAMED)
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        result[path.stem] = {case: _render(tokenizer, **conversation) for case, conversation in conversations.items()}
    return result


def _render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any] | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    # apply_chat_template drops null fields and gives spans only as tokens; this is what it calls for them.
    clean_messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    own = {"chat_template": tokenizer.chat_template, **tokenizer.special_tokens_map}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        texts, [spans] = render_jinja_template([clean_messages], return_assistant_tokens_mask=True, **own, **options)
    except (jinja2.TemplateError, TypeError):
        return None
    assert texts == [text]
    return {"text": text, "spans": [list(span) for span in spans]}


if __name__ == "__main__":
    out = FIXTURES / "templates.json"
    golden = json.loads(out.read_text(encoding="utf-8"))
    golden["rendered"] = render_with_transformers(golden["conversations"])
    out.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {out}")
