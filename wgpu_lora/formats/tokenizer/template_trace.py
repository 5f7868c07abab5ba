"""The parts of a conversation that appear in the text that a chat template renders.

A template that does not know of tool calls, say, renders a turn that consists of one as an empty answer. So the
conversation is rendered once more with marks in each of its parts. Where a mark is missing, it is rendered without the
part: if the text stays the same, the part is lost, else the template leaves out something of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from wgpu_lora.formats.tokenizer.chat_template import Message, TemplateError, arguments_of
from wgpu_lora.formats.tokenizer.reasoning import FIELDS as REASONING
from wgpu_lora.formats.tokenizer.reasoning import MARKER

TOOLS, CALLS, CONTENT = "tools", "tool_calls", "content"
_PLAIN = ("role", CONTENT, CALLS, "id", "tool_call_id", "type", *REASONING)  # ids only link a result to its call
# What stands for an argument of some type, and is written by Python and as JSON with different words.
_PROBES: tuple[tuple[Any, Any], ...] = ((bool, True), (type(None), None), ((list, dict), [True]))
_MOST = 8  # renderings to look for a kind of lost parts
Schemas = list[dict[str, Any]] | None
Render = Callable[[Sequence[Message], Schemas], str]


class Part(NamedTuple):
    """A part of a conversation: a field of a message, one of its tool calls, or with position -1 a schema of a tool."""

    position: int
    field: str
    number: int = 0


def lost_parts(
    messages: Sequence[Message], tools: Schemas, trained: Sequence[int], plain: str, render: Render
) -> tuple[set[Part], set[Part]]:
    """The parts of a conversation that are lost, and those of which the template leaves out something.

    Args:
        trained: positions of the trained turns. Templates may render reasoning only of the last turn, so it is also
            looked for in the conversation up to some of them, and not at all in other turns.
        plain: the text of the whole conversation. render: renders messages with tools; raises TemplateError.
    """
    try:
        missing = _missing(messages, tools, trained, render)
        omissions: set[Part] = set()
        for number, part in enumerate(sorted(missing)):
            if number >= 2 * _MOST or render(*_without(messages, tools, part)) == plain:
                omissions.add(part)
    except TemplateError:  # the template refuses marks
        return set(), set()
    # A template may cut the mark alone off.
    shortened = {part for part in missing - omissions if not _is_whole(messages, part, plain)}
    return omissions | _other_fields(messages, tools, render, plain), shortened


def _missing(messages: Sequence[Message], tools: Schemas, trained: Sequence[int], render: Render) -> set[Part]:
    """Parts with a mark that is not in the text."""
    marked, schemas, marks = _marked(messages, tools)
    text = render(marked, schemas).lower()  # templates may change the case
    missing = {mark for mark in marks if mark not in text}
    turns = sorted({marks[mark].position for mark in missing} & {*trained} - {len(messages) - 1})
    for turn in turns[:_MOST]:
        text = render(marked[: turn + 1], schemas).lower()
        of_turn = {mark for mark in missing if marks[mark].position == turn}
        missing -= {mark for mark in of_turn if mark in text}
    if turns and not any(marks[mark].position in turns[:_MOST] for mark in missing):
        missing = {mark for mark in missing if marks[mark].position not in turns}  # the others are alike
    parts = {marks[mark] for mark in missing}
    return {part for part in parts if part.field not in REASONING or part.position in trained}


def _is_whole(messages: Sequence[Message], part: Part, text: str) -> bool:
    content = messages[part.position].get(part.field) if part.position >= 0 else None
    return isinstance(content, str) and content.strip() in text


def _without(messages: Sequence[Message], tools: Schemas, part: Part) -> tuple[list[Message], Schemas]:
    position, field, number = part
    if position < 0:
        return list(messages), [tool for i, tool in enumerate(tools or ()) if i != number]
    result = dict(messages[position])
    if field == CALLS:
        result[CALLS] = [call for i, call in enumerate(result[CALLS]) if i != number]
    elif field == CONTENT:
        result[CONTENT] = ""
    else:
        del result[field]
    return [*messages[:position], result, *messages[position + 1 :]], tools


def _marked(messages: Sequence[Message], tools: Schemas) -> tuple[list[Message], Schemas, dict[str, Part]]:
    """Messages and tools with marks in each part, and the part of each mark."""
    unique = hashlib.sha256(repr((messages, tools)).encode(errors="replace")).hexdigest()[:12]
    marks: dict[str, Part] = {}

    def mark(*part: Any) -> str:
        text = f"zq{unique}x{len(marks)}qz"
        marks[text] = Part(*part)
        return text

    marked = []
    for i, message in enumerate(messages):
        result = dict(message)
        for field in [CONTENT, *[name for name in REASONING if message.get(name)][:1]]:
            if isinstance(text := message.get(field), str) and text.strip():
                # At both ends of the answer, which begins behind reasoning.
                start = max([0, *(item.end() for item in MARKER.finditer(text.rstrip()))])
                start += len(text[start:]) - len(text[start:].lstrip())
                end = len(text.rstrip())
                body = mark(i, field) + text[start:end] if start < end else text[start:end]
                result[field] = text[:start] + body + mark(i, field) + text[end:]
        if calls := message.get(CALLS):
            result[CALLS] = [_marked_function(call, partial(mark, i, CALLS, j)) for j, call in enumerate(calls)]
        marked.append(result)
    return (
        marked,
        tools and [_marked_function(tool, partial(mark, -1, TOOLS, j)) for j, tool in enumerate(tools)],
        marks,
    )


def _marked_function(value: dict[str, Any], mark: Callable[[], str]) -> dict[str, Any]:
    """A tool call or a schema with marks in its name, description and arguments; without a name, as a further key."""
    function = value.get("function")
    if isinstance(function, dict):
        return {**value, "function": _marked_function(function, mark)}
    arguments = arguments_of(value.get("arguments"))
    fields: dict[str, Any] = {key: f"{text}{mark()}" for key, text in _texts({**value, "arguments": arguments})}
    if not fields:
        fields[mark()] = "a"
    if isinstance(arguments, dict) and arguments:
        fields["arguments"] = {**arguments, mark(): "a"}
    return {**value, **fields}


def _texts(function: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("name", "description", "arguments"):
        if isinstance(text := function.get(key), str) and text:
            yield key, text


def lost_text(message: Message, text: str) -> str | None:
    """The field of an answer, its content or its reasoning, of which a rendered text lacks a part; None if it has all.

    White space and the marks of reasoning may differ.
    """
    squeezed = "".join(text.split()).lower()
    for field in (CONTENT, *[name for name in REASONING if message.get(name)][:1]):
        for piece in MARKER.split(value) if isinstance(value := message.get(field), str) else ():
            if piece and "".join(piece.split()).lower() not in squeezed:
                return field
    return None


def _arguments(messages: Sequence[Message]) -> Iterator[Any]:
    for message in messages:
        for call in message.get(CALLS) or ():
            yield arguments_of((call.get("function") or {}).get("arguments"))


def has_null(messages: Sequence[Message]) -> bool:
    """Whether an object of arguments, which is not given as text, has a null."""
    calls = (call.get("function") or {} for message in messages for call in message.get(CALLS) or ())
    return any(None in value.values() for call in calls if isinstance(value := call.get("arguments"), dict))


def prints_python(messages: Sequence[Message], tools: Schemas, render: Render) -> bool:
    """Whether a template writes true, null or a list in these arguments as Python does, so that they are no JSON."""
    values = [value for item in _arguments(messages) if isinstance(item, dict) for value in item.values()]
    probes = [probe for kind, probe in _PROBES if any(isinstance(value, kind) for value in values)]
    if not probes:
        return False
    mark = f"zq{hashlib.sha256(repr(messages).encode(errors='replace')).hexdigest()[:12]}qz"

    def probed(call: Message) -> Message:
        return {
            **call,
            "function": {**call["function"], "arguments": {f"{mark}{i}": probe for i, probe in enumerate(probes)}},
        }

    marked = [{**m, CALLS: [probed(call) for call in m[CALLS]]} if m.get(CALLS) else m for m in messages]
    try:
        text = render(marked, tools)
    except TemplateError:
        return False
    return any(re.match(r"\W{0,40}(True|None)", piece[1:]) for piece in text.split(mark)[1:])


def _other_fields(messages: Sequence[Message], tools: Schemas, render: Render, plain: str) -> set[Part]:
    """Fields that only some templates know, such as names, by rendering the conversation without them."""
    indices: dict[str, int] = {}
    for i, message in enumerate(messages):
        for name, value in message.items():
            if name not in _PLAIN and value is not None:
                indices.setdefault(name, i)
    omissions = set()
    for name in list(indices)[: 4 * _MOST]:
        without = [{key: value for key, value in message.items() if key != name} for message in messages]
        try:
            if render(without, tools) == plain:
                omissions.add(Part(indices[name], name))
        except TemplateError:  # the template needs the field
            continue
    return omissions
