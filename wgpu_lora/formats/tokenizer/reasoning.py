"""Marks of reasoning in the trained text of rows."""

from __future__ import annotations

import re
from collections.abc import Iterable

from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.examples import Alpaca, Completion, Conversation, Example, Text

FIELDS = ("reasoning_content", "thinking", "reasoning")  # of messages
_TAGS = "think|thinking|thought|reasoning"
# As models write them: tags, Mistral's brackets, Cohere's and OpenThoughts' special tokens, Seed's and Kimi's tags.
MARKER = re.compile(
    rf"[<◁]\s{{,9}}(?:seed:)?(?P<close>/)?\s{{,9}}(?:{_TAGS})\s{{,9}}[>▷]|\[(?P<end>/)?THINK\]|<\|(?P<stop>end_)(?:thinking|of_thought)\|>"
    r"|<\|(?:start_thinking|begin_of_thought)\|>",
    re.IGNORECASE,
)


def marker_in(text: str) -> str | None:
    """The first marker of reasoning in a text, or None."""
    match = MARKER.search(text)
    return match[0] if match else None


def mark_of(example: Example) -> str | None:
    """The first marker or field of reasoning in an example's trained text, quoted, or None."""
    if isinstance(example, Conversation):
        for i in sorted(example.trained):
            message = example.messages[i]
            if field := next((name for name in FIELDS if message.get(name)), None):
                return f"'{field}'"
            if mark := marker_in(message["content"] or ""):
                return repr(mark)
        return None
    mark = marker_in(_answer(example))
    return repr(mark) if mark else None


def _answer(example: Example) -> str:
    match example:
        case Completion():
            return example.completion
        case Alpaca():
            return example.output
        case Text():
            return example.text
        case _:
            return ""


def marks_of(templates: Iterable[str]) -> tuple[str, str] | None:
    """The markers around reasoning in chat templates, the opening one first; None without any."""
    found = [item for source in templates for item in MARKER.finditer(source)]
    ends = [item[0] for item in found if item["close"] or item["end"] or item["stop"]]
    begins = [item[0] for item in found if not (item["close"] or item["end"] or item["stop"])]
    if not ends:
        return None
    return (begins or [ends[0].replace("/", "", 1)])[0], ends[0]


def without_thinking(text: str) -> str:
    """The text without its reasoning, which may be nested. If a text only closes its reasoning, all before that is
    reasoning.

    Raises:
        UserError: the markers do not match, so that it is not known where the reasoning ends.
    """
    pieces: list[str] = []
    depth = at = 0
    first = True
    for item in MARKER.finditer(text):
        closes = bool(item["close"] or item["end"] or item["stop"])
        if not closes:
            if not depth:
                pieces.append(text[at : item.start()])
            depth += 1
        elif depth:
            depth -= 1
        elif first:  # the chat template has written the opening marker
            pieces.clear()
        else:
            raise UserError(f"{item[0]!r} closes no reasoning; remove it.")
        at, first = item.end(), False
    if depth:
        raise UserError("its reasoning is not closed, so it is not known where the answer begins; close or remove it.")
    if first:
        return text
    return "".join([*pieces, text[at:]]).strip()
