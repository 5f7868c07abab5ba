"""Rows beside transformers and TRL: texts of conversations with tools and reasoning, and prompts of preferences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import FIXTURES
from support.rows.data import NAMED, backend_json, chat
from tokenizers import Tokenizer as Backend

from wgpu_lora.data import UNTRAINED, Tokenizer, parse_example, tokenize_example
from wgpu_lora.data.preference_formats import PAIRS
from wgpu_lora.errors import UserError

pytestmark = pytest.mark.reference
CASES = [json.loads(line) for line in (FIXTURES / "data" / "rows.jsonl").read_text().splitlines()]
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} ARGUMENTS</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORMS = {
    "printed": ("{{ c.function.arguments }}", True),
    "joined": ("{{ '' + c.function.arguments }}", True),
    "as JSON": ("{{ c.function.arguments | tojson }}", False),
    "items": ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }} {% endfor %}", False),
}
ARGUMENTS = {"city": "K\u00f6ln", "deep": True, "n": None, "x": [1.5, {"a": "b"}]}


def ours(template: str) -> Tokenizer:
    return Tokenizer(Backend.from_str(backend_json()), special_tokens=NAMED, chat_templates={"default": template})


def theirs(template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(backend_json()), chat_template=template, **NAMED)


@pytest.mark.parametrize("name", FORMS)
def test_arguments_are_rendered_as_transformers_does_in_the_form_of_the_template(name: str) -> None:
    source, as_text = FORMS[name]
    template = CALLS.replace("ARGUMENTS", source)
    for value in (ARGUMENTS, json.dumps(ARGUMENTS, ensure_ascii=False)):
        given, taken = (
            [*chat("q"), {"role": "assistant", "content": "", "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": arguments}}]}]
            for arguments in (value, json.dumps(ARGUMENTS, ensure_ascii=False) if as_text else ARGUMENTS)
        )  # fmt: skip
        assert ours(template).render(given) == theirs(template).apply_chat_template(taken, tokenize=False)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "lfm2_2_5", "qwen2_5_training", "qwen3_training"])
def test_rows_of_public_reports_have_the_texts_and_masks_of_transformers(name: str) -> None:
    """A row is the text of the conversation up to its last trained turn, which transformers renders alike. With marks,
    and where the row is the whole conversation, the trained tokens are those of its assistant mask."""
    import trl

    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    mine, reference, rows = ours(template), theirs(template), 0
    for row in CASES:
        messages = row.get("messages")
        if messages is None or any({"function_call", "tool_calls"} & message.keys() for message in messages):
            continue
        try:
            example = parse_example(row)
            pairs = tokenize_example(example, mine)
        except UserError:
            continue
        assert not isinstance(example, str)
        texts = [
            reference.apply_chat_template(messages[: turn + 1], tools=row.get("tools"), tokenize=False)
            for turn in range(len(messages))
        ]
        for ids, labels in pairs:
            assert mine.decode(ids, skip_special_tokens=False) in texts
            rows += 1
            if "_training" in name and len(pairs) == 1 and not any("weight" in message for message in messages):
                whole = reference.apply_chat_template(
                    messages, tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
                )
                if not any({"train", "trainable", "loss"} & message.keys() for message in messages):
                    assert ids == whole["input_ids"]
                    assert [label != UNTRAINED for label in labels] == [bool(one) for one in whole["assistant_masks"]]
    assert rows > 5


def test_prompts_of_preferences_are_those_of_trl() -> None:
    from trl.data_utils import maybe_extract_prompt

    rows: list[dict[str, Any]] = [
        {"prompt": "q", "chosen": chat("q", "good"), "rejected": chat("q", "bad")},
        {"chosen": chat("q", "a", "r", "good"), "rejected": chat("q", "a", "r", "bad")},
        {"prompt": "q", "chosen": chat("q", "good", system="s"), "rejected": chat("q", "bad", system="s")},
    ]
    for row in rows:
        expected = maybe_extract_prompt(row)
        for example, answer in zip(PAIRS.read(row).examples, ("chosen", "rejected"), strict=True):
            assert example.messages == [*expected["prompt"], *expected[answer]]
            assert example.trained == {len(example.messages) - 1}
