"""Chat templates, rendered as in transformers.

A template comes with a downloaded checkpoint, so it is untrusted code: jinja2's sandbox keeps it from Python's own
objects, and it runs in a child process (tokenizer_process.py), which can only compute, for limited time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import setting

Message = dict[str, Any]
Span = tuple[int, int]
STANDARD_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")  # variables of every template

DATE = "template_date"
MAX_SOURCE = 1 << 17  # characters of a template; the longest published ones have about 20,000
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class _Recorder:
    """Characters written so far in a rendering, and the spans of the assistant's text."""

    def __init__(self) -> None:
        self.length = 0
        self.spans: list[Span] = []


_recorder: ContextVar[_Recorder | None] = ContextVar("chat_template_recorder", default=None)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` outputs its body and records its span."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Any) -> str:
        text = caller()
        recorder = _recorder.get()
        if recorder is not None:
            # Everything before this block has been yielded, so `length` is its offset.
            recorder.spans.append((recorder.length, recorder.length + len(text)))
        return text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_now: ContextVar[datetime | None] = ContextVar("chat_template_now", default=None)


def _strftime_now(format: str) -> str:
    return (_now.get() or datetime.now()).strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes HTML, which is wrong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class TemplateError(UserError):
    """A chat template refuses a conversation, or fails on it."""


class UnusableError(UserError):
    """A tokenizer or chat template cannot be used at all, so that reading data ends, also with --skip-bad-rows."""


class LimitError(UnusableError):
    """A tokenizer or chat template exceeded a limit of its process on some text; others may cost as much."""


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    del environment.filters["random"], environment.globals["lipsum"]  # rows must be functions of the data
    return environment


@lru_cache(maxsize=64)
def _compile(source: str, origin: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise UnusableError(f"The chat template{origin} is longer than {MAX_SOURCE:,} characters; use the model's own.")
    try:
        return _environment().from_string(source)
    except MemoryError:
        raise
    except Exception as error:
        wrong = f"{type(error).__name__}: {error!s:.200}"
        if isinstance(error, jinja2.TemplateSyntaxError):
            wrong = f"{error.message!s:.200}, line {error.lineno} of the template"
        raise UnusableError(
            f"The chat template{origin} cannot be compiled ({wrong}); use the template that the model was published "
            "with."
        ) from error


class Arguments(dict[str, Any]):
    """The arguments of a tool call: an object for templates that iterate over it or dump it as JSON, and its JSON text
    for those that print it or join it to other text.
    """

    def __init__(self, value: Mapping[str, Any], text: str | None = None) -> None:
        super().__init__(value)
        self._text = json.dumps(value, ensure_ascii=False) if text is None else text

    def __str__(self) -> str:
        return self._text

    __repr__ = __html__ = __str__

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def arguments_of(value: Any) -> Any:
    """Arguments of a tool call from an object or the text of one; anything else as it is."""
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return Arguments(parsed, value) if isinstance(parsed, dict) else value
    return Arguments(value) if isinstance(value, Mapping) else value


def _with_arguments(call: Any, as_text: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = arguments_of(function["arguments"])
    return {**call, "function": {**function, "arguments": str(arguments) if as_text else arguments}}


def _as_templates_expect(messages: Iterable[Mapping[str, Any]], as_text: bool) -> list[Message]:
    """Drop null fields, and provide the reasoning under all names that templates use, as transformers does.

    as_text: whether arguments of tool calls are JSON text, for templates that use methods of strings.
    """
    ready = []
    for message in messages:
        present = {key: value for key, value in message.items() if value is not None}
        reasoning = next((present[name] for name in _REASONING_FIELDS if name in present), None)
        if reasoning is not None:
            present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
        if calls := present.get("tool_calls"):
            present["tool_calls"] = [_with_arguments(call, as_text) for call in calls]
        ready.append(present)
    return ready


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise UserError if additional variables of a template are those that come from the row itself."""
    if reserved := variables.keys() & STANDARD_VARIABLES:
        raise UserError(
            f"chat_template_kwargs must not set {', '.join(sorted(reserved))}; they come from the row itself."
        )


def check_date(date: str | None) -> None:
    """Raise UserError unless a date is None or in ISO format."""
    try:
        datetime.fromisoformat(date or now())
    except ValueError:
        raise UserError(
            f"{setting('template_date', date)} is not a date in ISO format, such as 2026-07-31 or 2026-07-31T18:30:00."
        ) from None


def now() -> str:
    """The current date and time, for `template_kwargs`."""
    return datetime.now().isoformat(timespec="seconds")


def template_kwargs(enable_thinking: bool | None, date: str | None) -> dict[str, Any]:
    """Variables for the chat template, without those that are None. date: in ISO format, for `strftime_now`."""
    variables = {"enable_thinking": enable_thinking, DATE: date}
    return {name: value for name, value in variables.items() if value is not None}


def render(
    source: str,
    messages: Iterable[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    origin: str = "",
) -> tuple[str, list[Span]]:
    """Render a conversation with the template `source`.

    Args:
        messages: `{"role": ..., "content": ...}` and other fields that the template uses (`tool_calls`, ...).
        tools: JSON schemas of the available functions.
        add_generation_prompt: end with the header of an assistant's turn.
        variables: additional variables for the template (`enable_thinking`, ...); those in STANDARD_VARIABLES are
            ignored. The value of DATE is what `strftime_now` formats, in ISO format; by default, the time of the call.
        special_tokens: variables that come with the model (`bos_token`, ...).
        origin: where the template comes from, for messages, such as ` in DIRECTORY`.

    Returns:
        The text, and the character spans `[start, end)` of `{% generation %}` blocks (an empty list without any).

    Raises:
        UnusableError: the template cannot be compiled.
        TemplateError: the template refuses the conversation or fails.
        MemoryError: it takes more memory than there is.
    """
    template = _compile(source, origin)
    variables = dict(variables or {})
    date_text = variables.pop(DATE, None)
    date = _now.set(datetime.fromisoformat(date_text) if date_text else None)
    context = {**(special_tokens or {}), **variables}
    messages = list(messages)
    try:
        try:
            return _rendered(template, context, _as_templates_expect(messages, False), tools, add_generation_prompt)
        except TemplateError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            return _rendered(template, context, _as_templates_expect(messages, True), tools, add_generation_prompt)
    finally:
        _now.reset(date)


def _rendered(template: jinja2.Template, context: Mapping[str, Any], *standard: Any) -> tuple[str, list[Span]]:
    """The text and spans of `render`, with messages as they are. Raises TemplateError, MemoryError."""
    recorder = _Recorder()
    pieces: list[str] = []
    ready, tools, add_generation_prompt = standard
    token = _recorder.set(recorder)
    try:
        arguments = dict(zip(STANDARD_VARIABLES, (ready, tools, None, add_generation_prompt), strict=True))
        for piece in template.generate({**context, **arguments}):
            pieces.append(piece)
            recorder.length += len(piece)
    except MemoryError:
        raise
    except jinja2.UndefinedError as error:
        raise TemplateError(
            f"The chat template needs something that the conversation lacks: {error!s:.200}."
        ) from error
    except jinja2.TemplateError as error:
        raise TemplateError(f"The chat template refuses this conversation: {error!s:.500}") from error
    except Exception as error:  # untrusted code may raise anything
        raise TemplateError(
            f"The chat template fails on this conversation ({type(error).__name__}: {error!s:.200}); "
            "check the messages against what the template expects."
        ) from error
    finally:
        _recorder.reset(token)
    return "".join(pieces), recorder.spans
