"""What of a conversation leaves a trace in the text that a chat template makes of it.

A template that does not know of tool calls, say, renders a turn that consists of one as an empty answer. So the
conversation is rendered once more with a mark in each of its parts: a part is lost if the text lacks its mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from wgpu_lora.data.template import Message
from wgpu_lora.data.thinking import FIELDS as REASONING
from wgpu_lora.errors import UserError

TOOLS, CALLS, CONTENT = "tools", "tool_calls", "content"
_PLAIN = ("role", CONTENT, CALLS, "id", "tool_call_id", "type", *REASONING)  # ids only link a result to its call
_MOST_FIELDS = 8  # other fields that are looked for
Render = Callable[[Sequence[Message], list[dict[str, Any]] | None], str]


def lost_parts(
    messages: Sequence[Message], tools: list[dict[str, Any]] | None, trained: Sequence[int], render: Render
) -> set[tuple[int, str]]:
    """The parts of a conversation without which the template gives the same text.

    Args:
        trained: positions of the trained turns. Templates may render reasoning only of the last turn, so it is also
            looked for in the conversation up to each of them, and not at all in other turns.
        render: renders messages with tools; raises UserError.

    Returns:
        (position of the message, name of its field); for tools, (-1, "tools").
    """
    marked, schemas, marks = _marked(messages, tools)
    try:
        text = render(marked, schemas).lower()  # templates may change the case
        lost = {mark for mark in marks if mark not in text}
        for turn in trained:
            if turn + 1 < len(messages) and any(marks[mark][0] == turn for mark in lost):
                text = render(marked[: turn + 1], schemas).lower()
                lost -= {mark for mark in lost if marks[mark][0] == turn and mark in text}
    except UserError:  # the template refuses marks, or the conversation itself
        return set()
    return {
        marks[mark] for mark in lost if marks[mark][1] not in REASONING or marks[mark][0] in trained
    } | _other_fields(messages, tools, render)


def _marked(
    messages: Sequence[Message], tools: list[dict[str, Any]] | None
) -> tuple[list[Message], list[dict[str, Any]] | None, dict[str, tuple[int, str]]]:
    """Messages and tools with a mark in each part, and the part of each mark."""
    stated, number = repr((messages, tools)).lower(), 0
    while f"zq{number}" in stated:
        number += 1
    marks: dict[str, tuple[int, str]] = {}

    def mark(position: int, field: str) -> str:
        text = f"zq{number}x{len(marks)}qz"
        marks[text] = position, field
        return text

    marked = []
    for i, message in enumerate(messages):
        changed = dict(message)
        for field in [CONTENT, *[name for name in REASONING if message.get(name)][:1]]:
            if isinstance(text := message.get(field), str) and text.strip():
                bare = text.rstrip()
                changed[field] = bare + mark(i, field) + text[len(bare) :]
        if calls := message.get(CALLS):
            changed[CALLS] = [_marked_function(call, partial(mark, i, CALLS)) for call in calls]
        marked.append(changed)
    return marked, tools and [_marked_function(tool, partial(mark, -1, TOOLS)) for tool in tools], marks


def _marked_function(value: dict[str, Any], mark: Callable[[], str]) -> dict[str, Any]:
    """A tool call or a schema with marks in its name and in its arguments."""
    function = value.get("function")
    if isinstance(function, dict):
        return {**value, "function": _marked_function(function, mark)}
    changed = dict(value)
    if isinstance(value.get("name"), str):
        changed["name"] = value["name"] + mark()
    if isinstance(value.get("arguments"), dict) and value["arguments"]:
        changed["arguments"] = {**value["arguments"], mark(): "a"}
    elif isinstance(value.get("arguments"), str) and value["arguments"]:
        changed["arguments"] = value["arguments"] + mark()
    return changed


def _other_fields(
    messages: Sequence[Message], tools: list[dict[str, Any]] | None, render: Render
) -> set[tuple[int, str]]:
    """Fields that only some templates know, such as names, by rendering the conversation without them."""
    places: dict[str, int] = {}
    for i, message in enumerate(messages):
        for name, value in message.items():
            if name not in _PLAIN and value is not None:
                places.setdefault(name, i)
    lost = set()
    for name in list(places)[:_MOST_FIELDS]:
        without = [{key: value for key, value in message.items() if key != name} for message in messages]
        try:
            if render(messages, tools) == render(without, tools):
                lost.add((places[name], name))
        except UserError:  # the template needs the field
            continue
    return lost
