"""Why a row that was read is rejected nevertheless."""

from __future__ import annotations

from wgpu_lora.data.empty import without_empty_answers
from wgpu_lora.data.examples import Alpaca, Completion, Conversation, Example, Text, Tokens
from wgpu_lora.data.preparing.kinds import Read
from wgpu_lora.data.thinking import mark_of
from wgpu_lora.data.tokenizer import MAX_TEXT
from wgpu_lora.names.spelling import flag

_UNTRAINED = -100


def reason_against(read: Read, thinks: bool | None, dropped: bool, most: int | None) -> str | None:
    """Why a row is rejected; None if it is kept.

    Args:
        thinks: `enable_thinking` of rows that do not set it. dropped: whether reasoning was dropped.
        most: characters of a row.
    """
    for example in read.sample.examples:
        if without_empty_answers(example, True)[0] is None:
            return "the answer is empty."
        if not _is_trained(example):
            return "it has no answer to train on."
        if (off := _thinking_off(example, thinks) or dropped) and (mark := mark_of(example)):
            why = f"its reasoning was dropped ({flag('drop_thinking')})" if dropped else "'enable_thinking' is off"
            cure = "" if dropped or not off else f"; drop reasoning with {flag('drop_thinking')}"
            return f"{mark} is left in trained text, but {why}{cure}."
        if (size := _bytes(example)) > MAX_TEXT:
            return f"its text takes {size:,} bytes, more than the {MAX_TEXT >> 20} MiB of a row; split it."
    if most is not None and (count := sum(map(characters, read.sample.examples))) > most:
        return f"it has {count:,} characters, more than {most:,}; split it."
    return None


def _is_trained(example: Example) -> bool:
    if isinstance(example, Conversation):
        return bool(example.trained)
    return not isinstance(example, Tokens) or any(label != _UNTRAINED for label in example.labels[1:])


def _thinking_off(example: Example, thinks: bool | None) -> bool:
    own = example.template_kwargs.get("enable_thinking") if isinstance(example, Conversation) else None
    return (thinks if own is None else own) is False


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
