"""Edits of rows before they are read: system messages and reasoning are dropped."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from wgpu_lora.data.example_formats import EXAMPLES
from wgpu_lora.data.preference_formats import LABELLED, PAIRS
from wgpu_lora.data.row_formats import Fields, RowFormat, RowFormats
from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.examples import (
    Alpaca,
    Completion,
    Conversation,
    Example,
    Sample,
    Text,
    Tokens,
    without_empty_answers,
)
from wgpu_lora.formats.tokenizer.reasoning import FIELDS, mark_of, without_thinking
from wgpu_lora.formats.tokenizer.tokenizer import MAX_TEXT
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import join_words

_SYSTEM = ("system", "developer")
_ASSISTANT = ("assistant", "gpt")
_OF_THOUGHT = ("thinking", "reasoning")  # types of content parts


def listed_messages(row: Row) -> Row:
    """The row with its conversations as lists, which tables may hold as JSON."""
    conversations = {
        name: _parsed(row[name]) for name in ("messages", "conversations") if isinstance(row.get(name), str)
    }
    return {**row, **conversations} if conversations else row


def _parsed(text: str) -> Any:
    try:
        result = json.loads(text) if text.lstrip().startswith("[") else text
    except (ValueError, RecursionError):  # is reported when the row is read
        return text
    return result if isinstance(result, list) else text


def without_system(row: Row) -> tuple[Row, int]:
    """The row without system messages, and how many there were."""
    edited, count = dict(row), 0
    for name in MESSAGE_COLUMNS:
        value: Any = row.get(name)
        if _are_messages(value):
            edited[name] = [message for message in value if _role(message) not in _SYSTEM]
            count += len(value) - len(edited[name])
    if isinstance(row.get("system"), str):
        count += bool(edited.pop("system"))
    return edited, count


def without_reasoning(row: Row) -> tuple[Row, int]:
    """The row without reasoning in its answers, and the number of answers that had any.

    Raises:
        UserError: markers of reasoning in an answer do not match.
    """
    edited, count = dict(row), 0
    for name in MESSAGE_COLUMNS:
        value: Any = row.get(name)
        if _are_messages(value):
            result = [_message_without(message) for message in value]
            count += sum(new is not old for new, old in zip(result, value, strict=True))
            edited[name] = result
    for name in ANSWER_COLUMNS:
        if isinstance(text := row.get(name), str):
            edited[name] = _with_label(without_thinking, text, f"'{name}'")
            count += edited[name] != text
    return edited, count


def _message_without(message: Row) -> Row:
    if _role(message) not in _ASSISTANT:
        return message
    result = {key: value for key, value in message.items() if key not in FIELDS or not isinstance(value, str | None)}
    for key in ("content", "value"):
        text = result.get(key)
        if isinstance(text, list):
            parts = [part for part in text if not (isinstance(part, dict) and part.get("type") in _OF_THOUGHT)]
            plain = all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)
            text = "".join(part["text"] for part in parts) if plain else parts
            is_shorter = len(parts) < len(result[key])
            bare = _with_label(without_thinking, text, "an answer") if isinstance(text, str) else text
            if is_shorter or bare != text:
                result[key] = bare
        elif isinstance(text, str):
            result[key] = _with_label(without_thinking, text, "an answer")
    return result if result != message else message


def _with_label(edit: Callable[[str], str], text: str, label: str) -> str:
    try:
        return edit(text)
    except UserError as error:
        raise UserError(f"{label}: {error}") from None


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _role(message: Row) -> Any:
    return message.get("from") if "from" in message else message.get("role")


_UNTRAINED = -100


def rejection_reason(
    read: Read, thinks: bool | None, reasoning_dropped: bool, max_characters: int | None
) -> str | None:
    """Why a row is rejected; None if it is kept.

    Args:
        thinks: `enable_thinking` of rows that do not set it. reasoning_dropped: whether it was.
        max_characters: of a row.
    """
    for example in read.sample.examples:
        if without_empty_answers(example, True)[0] is None:
            return "the answer is empty."
        if not _is_trained(example):
            return "it has no answer to train on."
        if (off := _thinking_off(example, thinks) or reasoning_dropped) and (mark := mark_of(example)):
            why = (
                f"its reasoning was dropped ({flag('drop_thinking')})"
                if reasoning_dropped
                else "'enable_thinking' is off"
            )
            cure = "" if reasoning_dropped or not off else f"; drop reasoning with {flag('drop_thinking')}"
            return f"{mark} is left in trained text, but {why}{cure}."
        if (size := _bytes(example)) > MAX_TEXT:
            return f"its text takes {size:,} bytes, more than the {MAX_TEXT >> 20} MiB of a row; split it."
    if max_characters is not None and (count := sum(map(characters, read.sample.examples))) > max_characters:
        return f"it has {count:,} characters, more than {max_characters:,}; split it."
    return None


def _is_trained(example: Example) -> bool:
    if isinstance(example, Conversation):
        return bool(example.trained)
    return not isinstance(example, Tokens) or any(label != _UNTRAINED for label in example.labels[1:])


def _thinking_off(example: Example, thinks: bool | None) -> bool:
    enable_thinking = example.template_kwargs.get("enable_thinking") if isinstance(example, Conversation) else None
    return (thinks if enable_thinking is None else enable_thinking) is False


def characters(example: Example) -> int:
    """Characters of an example's text; of tokens, their number."""
    return len(example.input_ids) if isinstance(example, Tokens) else sum(map(len, _texts(example)))


def _bytes(example: Example) -> int:
    return sum(len(text.encode()) for text in _texts(example))


def _texts(example: Example) -> list[str]:
    match example:
        case Conversation():
            return [message["content"] or "" for message in example.messages]
        case Completion():
            return [example.prompt, example.completion]
        case Alpaca():
            return [example.system, example.instruction, example.input, example.output]
        case Text():
            return [example.text]
        case _:
            return []


def json_row(row: Row, columns: Collection[str]) -> tuple[Row, list[str]]:
    """The row as JSON has it, and the columns that were dropped, such as images.

    columns: columns that the formats read; their values are checked when they are read.
    """
    result, dropped_columns = {}, []
    for name, value in row.items():
        try:
            result[name] = json.loads(json.dumps(value, default=_text))
        except (TypeError, ValueError):
            if name not in columns:
                dropped_columns.append(name)
    return result, dropped_columns


def _text(value: Any) -> str:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not of JSON")


EXAMPLE, PAIR, LABEL = "example", "pair", "labelled answer"
# Where rows of a kind are written; examples go into TRAIN and VALID.
TRAIN, VALID = "train.jsonl", "valid.jsonl"
FILES = {EXAMPLE: TRAIN, PAIR: "preferences.jsonl", LABEL: "labelled.jsonl"}


@dataclass(frozen=True)
class Read:
    """A row that was read. format: its required keys."""

    kind: str
    format: str
    sample: Sample


def _tagged(kind: str, formats: RowFormats[Sample]) -> tuple[RowFormat[Read], ...]:
    return tuple(_reading(kind, form) for form in formats.formats)


def _reading(kind: str, form: RowFormat[Sample]) -> RowFormat[Read]:
    name = ", ".join(form.required)

    def read(row: Fields) -> Read:
        sample = form.convert(row)
        row.keep()  # all columns are written
        return Read(kind, name, sample)

    return RowFormat(form.required, read, form.optional)


ROWS: RowFormats[Read] = RowFormats((*_tagged(PAIR, PAIRS), *_tagged(LABEL, LABELLED), *_tagged(EXAMPLE, EXAMPLES)))
# Columns that may hold messages, and those that may hold the text of an answer.
MESSAGE_COLUMNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
ANSWER_COLUMNS = ("completion", "chosen", "rejected", "output", "text")
Row = dict[str, Any]


def examples_only(patterns: Sequence[str]) -> RowFormats[Read]:
    """The formats, for files that may not give pairs and labelled answers, since they do not match the patterns."""
    names = join_words([repr(pattern) for pattern in patterns])

    def refusing(form: RowFormat[Read]) -> RowFormat[Read]:
        def read(row: Fields) -> Read:
            result = form.convert(row)
            if result.kind != EXAMPLE:
                raise UserError(f"{result.kind}s are only taken from files that match {names}.")
            return result

        return replace(form, convert=read)

    return replace(ROWS, formats=tuple(map(refusing, ROWS.formats)))
