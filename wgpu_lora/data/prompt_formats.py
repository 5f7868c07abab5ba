"""The formats of rows that are prompts, of which the model samples completions itself, as in TRL.

    prompt_ids                  tokens
    prompt [tools]              a text, or a list of messages
    messages [tools]            a conversation, without what the assistant says at its end

All columns are kept for reward functions (`Sample.columns`).
"""

from __future__ import annotations

from typing import Any

from wgpu_lora.data.column_types import MESSAGES, TEXT, TEXT_OR_MESSAGES, TOKENS
from wgpu_lora.data.example_formats import CHAT_COLUMNS, conversation, with_system
from wgpu_lora.data.row_formats import Fields, RowFormat, RowFormats
from wgpu_lora.data.unread_columns import is_input
from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.examples import Prompt, Sample, Tokens

_OF_PROMPT = ("system", "tools", "functions", "chat_template_kwargs")  # columns that only a prompt can use


def before_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation without what the assistant says at its end."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return messages


def _sample(row: Fields, prompt: Prompt | Tokens) -> Sample:
    return Sample((prompt,), columns=row.keep(but=lambda name: name in _OF_PROMPT or is_input(name)))


def _tokens(row: Fields) -> Sample:
    ids = row["prompt_ids"]
    return _sample(row, Tokens(ids, ids))


def _text_or_messages(row: Fields) -> Sample:
    text = row["prompt"]
    return _sample(row, Prompt(text)) if isinstance(text, str) else _messages(row, text)


def _messages(row: Fields, messages: list[dict[str, Any]]) -> Sample:
    messages = before_answer(messages)
    if not messages:
        raise UserError("the conversation has no message before the assistant's, so there is no prompt.")
    chat = conversation(row, messages)
    return _sample(row, Prompt(chat.messages, chat.tools, chat.template_kwargs))


PROMPTS = RowFormats(
    (
        RowFormat({"prompt_ids": TOKENS}, _tokens),
        RowFormat({"prompt": TEXT_OR_MESSAGES}, _text_or_messages, CHAT_COLUMNS),
        RowFormat(
            {"messages": MESSAGES},
            lambda row: _messages(row, with_system(row, "messages")),
            {"system": TEXT, **CHAT_COLUMNS},
        ),
    )
)
