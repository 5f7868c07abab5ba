"""Edits of rows before they are read: system messages and reasoning are dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from wgpu_lora.data.preparing.kinds import ANSWER_COLUMNS, MESSAGE_COLUMNS, Row
from wgpu_lora.data.preparing.thinking import without_thinking
from wgpu_lora.data.thinking import FIELDS
from wgpu_lora.errors import UserError

_SYSTEM = ("system", "developer")
_ASSISTANT = ("assistant", "gpt")
_OF_THOUGHT = ("thinking", "reasoning")  # types of content parts


def listed_messages(row: Row) -> Row:
    """The row with its conversations as lists, which tables may hold as JSON."""
    changed = {name: _parsed(row[name]) for name in ("messages", "conversations") if isinstance(row.get(name), str)}
    return {**row, **changed} if changed else row


def _parsed(text: str) -> Any:
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text
    except (ValueError, RecursionError):  # is reported when the row is read
        return text
    return found if isinstance(found, list) else text


def without_system(row: Row) -> tuple[Row, int]:
    """The row without system messages, and how many there were."""
    edited, dropped = dict(row), 0
    for name in MESSAGE_COLUMNS:
        value: Any = row.get(name)
        if _are_messages(value):
            edited[name] = [message for message in value if _role(message) not in _SYSTEM]
            dropped += len(value) - len(edited[name])
    if isinstance(row.get("system"), str):
        dropped += bool(edited.pop("system"))
    return edited, dropped


def without_reasoning(row: Row) -> tuple[Row, int]:
    """The row without reasoning in its answers, and the number of answers that had any.

    Raises:
        UserError: markers of reasoning in an answer do not match.
    """
    edited, dropped = dict(row), 0
    for name in MESSAGE_COLUMNS:
        value: Any = row.get(name)
        if _are_messages(value):
            made = [_message_without(message) for message in value]
            dropped += sum(new is not old for new, old in zip(made, value, strict=True))
            edited[name] = made
    for name in ANSWER_COLUMNS:
        if isinstance(text := row.get(name), str):
            edited[name] = _said(without_thinking, text, f"'{name}'")
            dropped += edited[name] != text
    return edited, dropped


def _message_without(message: Row) -> Row:
    if _role(message) not in _ASSISTANT:
        return message
    made = {key: value for key, value in message.items() if key not in FIELDS or not isinstance(value, str | None)}
    for key in ("content", "value"):
        text = made.get(key)
        if isinstance(text, list):
            parts = [part for part in text if not (isinstance(part, dict) and part.get("type") in _OF_THOUGHT)]
            plain = all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)
            text = "".join(part["text"] for part in parts) if plain else parts
            changed = len(parts) < len(made[key])
            bare = _said(without_thinking, text, "an answer") if isinstance(text, str) else text
            if changed or bare != text:
                made[key] = bare
        elif isinstance(text, str):
            made[key] = _said(without_thinking, text, "an answer")
    return made if made != message else message


def _said(edit: Callable[[str], str], text: str, what: str) -> str:
    try:
        return edit(text)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _role(message: Row) -> Any:
    return message.get("from") if "from" in message else message.get("role")
