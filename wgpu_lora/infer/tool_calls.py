"""Calls of tools in an answer's text, as families of models write them.

| family | form |
| --- | --- |
| Hermes, Qwen | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several times |
| Mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` |
| Llama 3 | `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`, several with `;` between them |

Models write either key in all of them. Arguments that are absent, null or blank are {}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.infer.answers import overlap
from wgpu_lora.names.text import common_prefix

Json = dict[str, Any]
CALL, END_CALL, CALLS, ARGS, PYTHON = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"
KEYS = {"name", "arguments", "parameters", "type", "id"}  # of calls
MARKERS = (CALL, END_CALL, CALLS, ARGS, PYTHON)


@dataclass(frozen=True)
class ToolFormat:
    """begin, end: of a call, or of all calls. arguments: the key that templates of the family write."""

    begin: str
    end: str = ""
    arguments: str = "arguments"
    bare: bool = False  # a call may stand without `begin`, as a whole answer


HERMES, MISTRAL, LLAMA = ToolFormat(CALL, END_CALL), ToolFormat(CALLS), ToolFormat(PYTHON, "", "parameters", True)


FORMATS = (HERMES, MISTRAL, LLAMA)
QUESTION: Json = {"role": "user", "content": "?"}
TRIAL: Json = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TRIAL_TOOL: Json = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def tool_format(
    tokenizer: Tokenizer, tools: Sequence[Json] = (TRIAL_TOOL,), variables: Mapping[str, Any] | None = None
) -> ToolFormat:
    """The format in which a model's chat template writes a call: one is rendered, and parsed back.

    Args:
        tools, variables: what the template is given, as for `Tokenizer.render`.

    Raises:
        UserError: it has no tools, or none of the formats above.
    """
    templates = tokenizer.chat_templates
    source = templates.get("tool_use") or templates.get("default", "")
    if "tools" not in source:
        raise UserError("The model's chat template has no tools: leave 'tools' out, or use another model.")
    try:
        text, _ = rendered_call(tokenizer, tools, variables)
    except UserError:
        text = ""  # it takes no such calls
    for form in FORMATS:
        _, calls = ToolCallParser(form).push(text, last=True)
        functions = [call["function"] for call in calls]
        if [(function["name"], function["arguments"].replace(" ", "")) for function in functions] == [("f", '{"x":1}')]:
            return form
    raise UserError(
        "The chat template writes calls of tools in a form that is not known here: use a model with those of Hermes, "
        "Qwen, Llama 3 or Mistral."
    )


def rendered_call(
    tokenizer: Tokenizer, tools: Sequence[Json], variables: Mapping[str, Any] | None = None
) -> tuple[str, str]:
    """(a turn that calls `TRIAL`, what the chat template writes behind the turns of an assistant). Raises UserError."""
    turns: list[Json] = [{"content": "", "tool_calls": [TRIAL]}, {"content": "zanzibar"}]
    prompt, *conversations = [QUESTION], *([QUESTION, {"role": "assistant", **turn}] for turn in turns)
    header = tokenizer.render(prompt, [*tools], True, variables)
    call, plain = (tokenizer.render(conversation, [*tools], variables=variables) for conversation in conversations)
    end = common_prefix(call[::-1], plain[::-1])[::-1]
    return call[len(common_prefix(header, call)) : len(call) - len(end)], end


class ToolCallParser:
    """Splits an answer, piece by piece, into content and calls. A call is complete at once; one that is no call, such
    as broken JSON, is content.

    Args:
        names: of the tools that may be called; None for any.
        single: whether the answer ends with its first call.
        forced: whether a grammar makes the answer calls alone, which ends once it repeats one of them.

    Attributes:
        ended: whether nothing more of the answer is read.
    """

    def __init__(
        self, form: ToolFormat, names: Collection[str] | None = None, single: bool = False, forced: bool = False
    ) -> None:
        self._form, self._names, self._single, self._forced, self.ended = form, names, single, forced, False
        self._text = ""  # that may be, or begin, a call
        self._inside = False
        self._content = ""
        self.calls: list[Json] = []

    def push(self, text: str, last: bool = False) -> tuple[str, list[Json]]:
        """(content, calls) that are certain now."""
        form, start, content = self._form, len(self.calls), ""
        if self.ended:
            return "", []
        self._text += text
        if self._forced:
            return self._read_forced(last), self.calls[start:]
        while True:
            if not self._inside:
                begin = self._text.find(form.begin)
                if form.bare and begin and not self._content:
                    bare = self._text.lstrip()
                    if not bare and not last:
                        break
                    begin = 0 if bare.startswith("{") else begin
                keep = 0 if last else overlap(self._text, form.begin)
                end = begin if begin >= 0 else len(self._text) - keep
                content += self._text[:end]
                self._content += self._text[:end]
                self._text, self._inside = self._text[end:], begin >= 0
            if not self._inside:
                break
            end = self._text.find(form.end, len(form.begin)) if form.end else -1
            if end < 0 and not last:
                break
            whole = self._text if end < 0 else self._text[: end + len(form.end)]
            self._text, self._inside = self._text[len(whole) :], False
            if not self._read(whole):
                content += whole
        # Whitespace between calls, and before the first, is no content.
        if self.calls and not content.strip():
            content = ""
        if self._single and self.calls:
            self.calls, self.ended = self.calls[:1], True
        return content, self.calls[start:]

    def _read_forced(self, last: bool) -> str:
        """Add the calls that are complete; returns one that the end of the answer cuts off, as content."""
        while (start := self._text.find("{")) >= 0 and not self.ended:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, start)
            except ValueError:
                return self._text[start:] if last else ""
            arguments = self._text[start : end - 1].partition(f'"{self._form.arguments}": ')[2]  # as the grammar has it
            call = tool_call(value["name"], arguments)
            self.ended = any(call["function"] == other["function"] for other in self.calls)
            if self.ended:
                break
            self.calls.append(call)
            self._text = self._text[end:]
        return ""

    def _read(self, text: str) -> bool:
        """Add the calls of a text; False if it has none, or something else."""
        body = text.removeprefix(self._form.begin).removesuffix(self._form.end or "\0").strip()
        calls: list[Any] = []
        try:
            while body:
                name = ""
                if self._form is MISTRAL and (match := re.match(r"([\w.-]+)\s*(\[CALL_ID\]\w+)?\[ARGS\]", body)):
                    name, body = match[1], body[match.end() :].lstrip()
                blank = name and (not body or body.startswith(self._form.begin))
                value, end = (None, 0) if blank else json.JSONDecoder().raw_decode(body)
                values: list[Any] = (
                    value if isinstance(value, list) else [{"name": name, "arguments": value} if name else value]
                )
                if self._form.bare and any(call.keys() - KEYS for call in values):
                    return False  # an answer that has a name
                calls += [tool_call(call["name"], self._arguments(call)) for call in values]
                body = body[end:].lstrip("; \n\r\t").removeprefix(self._form.begin)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False
        if self._names is not None and any(call["function"]["name"] not in self._names for call in calls):
            return False
        self.calls += calls
        return bool(calls)

    def _arguments(self, call: Json) -> Any:
        values = (call.get(key) for key in (self._form.arguments, "arguments", "parameters"))
        return next((value for value in values if value is not None and str(value).strip()), {})


def tool_call(name: Any, arguments: Any) -> Json:
    """A call as OpenAI's. Raises ValueError if the arguments are no JSON, or the name no text."""
    if not isinstance(name, str):
        raise ValueError("the name of a function must be text")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # half of a surrogate pair cannot be sent
    return {"id": f"call_{token_hex(12)}", "type": "function", "function": {"name": name, "arguments": text}}
