"""The formats of rows, and their conversion to validated examples.

The keys of a row determine its format. If a row has the keys of several formats (Alpaca's file also has "text"), the
first in this order whose keys are not null is used:

    input_ids [labels, attention_mask]      tokens, and labels with -100 for tokens that are not trained on
    messages [tools]                        a conversation in the format of OpenAI and TRL
    conversations [system, tools]           a conversation in the format of ShareGPT
    prompt, completion [tools]              two texts, or two lists of messages
    instruction, output [input, system]     Alpaca
    text                                    plain text
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wgpu_lora.data.guesses import OTHER_ROLES, renaming
from wgpu_lora.data.source import Place, Source, kind_of, strict_rows
from wgpu_lora.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"} | {role: role for role in ROLES}
# The required keys of each format, in order of preference.
_FORMATS = (("input_ids",), ("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"),
            ("text",))  # fmt: skip
# Fields that may be JSON in a string, since columns of tables have a single type.
LISTS = ("input_ids", "labels", "attention_mask", "messages", "conversations", "tools")
COLUMNS = {*(key for keys in _FORMATS for key in keys), *LISTS, "input", "system", "chat_template_kwargs"}
_KEYS = "; ".join(" and ".join(keys) for keys in _FORMATS)


@dataclass(frozen=True)
class Tokens:
    """A tokenised row. `labels` are unshifted, with -100 for tokens that are not trained on."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template; `trained` are the positions of the turns to train on."""

    messages: list[dict[str, Any]]
    trained: frozenset[int]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    prompt: str
    completion: str


@dataclass(frozen=True)
class Alpaca:
    instruction: str
    input: str
    output: str
    system: str

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The messages before the output, for models with a chat template."""
        before = [{"role": "system", "content": self.system}] if self.system else []
        question = f"{self.instruction}\n\n{self.input}" if self.input else self.instruction
        return [*before, {"role": "user", "content": question}]


@dataclass(frozen=True)
class Text:
    text: str


Example = Tokens | Conversation | Completion | Alpaca | Text


def read_examples(source: Source) -> Iterator[tuple[Place, Example]]:
    """Yield (place, example) for every row of a source.

    Raises:
        UserError: a row cannot be read or fits no format; names its place.
    """
    for place, row in strict_rows(source):
        try:
            example = parse_example(row)
        except UserError as error:
            raise UserError(f"{source.where(place)}: {error}") from error
        yield place, example


def format_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The required keys of the format that a row fits; () if it fits none."""
    given = [key for key, value in row.items() if value is not None]
    return next((keys for names in (given, row) for keys in _FORMATS if all(key in names for key in keys)), ())


Check = Callable[[Sequence[str]], None]


def check_columns(names: Sequence[str]) -> None:
    """Raise UserError unless these columns fit a format; the message lists them."""
    if format_of(dict.fromkeys(names, "")):
        return
    shown = ", ".join(repr(name[:80]) for name in names[:20]) or "none"
    raise UserError(f"the columns are {shown}, but the formats need {_KEYS}; {renaming(names) or 'rename them'}.")


def parse_example(row: dict[str, Any]) -> Example:
    """Determine the format of a row by its keys, and validate its fields.

    Raises:
        UserError: the row fits no format or a field has the wrong type. The message names the field, not the place.
    """
    match format_of(row):
        case ("input_ids",):
            return _tokens(row)
        case ("messages",):
            return _conversation(_messages(_list(row, "messages"), "messages"), 0, row)
        case ("conversations",):
            return _sharegpt(row)
        case ("prompt", "completion"):
            return _completion(row)
        case ("instruction", "output"):
            return Alpaca(*(_string(row, name) for name in ("instruction", "input", "output", "system")))
        case ("text",):
            return Text(_string(row, "text"))
    keys = ", ".join(repr(key[:80]) for key in list(row)[:12]) or "none"
    raise UserError(f"the row fits no format: its keys are {keys}, but the formats need {_KEYS}{_instead(row)}.")


def remedy(row: dict[str, Any]) -> str | None:
    """Advice for an object that contains rows instead of being one; None if it does not."""
    for name, value in row.items():
        if name not in COLUMNS and isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            return f"its rows seem to be the list {name[:80]!r}: write only that list to the file"
    texts = [value for name, value in row.items() if name in COLUMNS and name not in LISTS]
    if texts and all(isinstance(value, list) and value and isinstance(value[0], str) for value in texts):
        return "it has columns, not rows: write a list of objects, one for each row"
    return None


def _instead(row: dict[str, Any]) -> str:
    found = remedy(row) or renaming(list(row))
    return f"; {found}" if found else ""


def _completion(row: dict[str, Any]) -> Conversation | Completion:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        if prompt and isinstance(prompt[0], str):
            raise UserError(f"'prompt' is a list of strings{_instead(row)}.")
        before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
        return _conversation(before + after, len(before), row)
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion)
    raise UserError(
        f"'prompt' is {kind_of(prompt)} and 'completion' {kind_of(completion)}, "
        "but both must be strings or both lists of messages."
    )


def _list(row: dict[str, Any], name: str) -> Any:
    """A field that is a list, or a string with JSON of one, as in tables whose columns have a single type."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"'{name}' is a string that is not valid JSON; give a list, or the output of json.dumps."
        ) from error


def _string(row: dict[str, Any], name: str) -> str:
    """A text field; only `input` and `system` may be missing or null."""
    value = row.get(name)
    if value is None and name in ("input", "system"):
        return ""
    if not isinstance(value, str):
        raise UserError(f"'{name}' is {kind_of(value)}, but must be a string{_instead(row)}.")
    return value


def _tokens(row: dict[str, Any]) -> Tokens:
    ids = _integers(_list(row, "input_ids"), "input_ids", least=0)
    labels = ids if row.get("labels") is None else _integers(_list(row, "labels"), "labels", least=-100)
    if len(labels) != len(ids):
        raise UserError(f"'labels' has {len(labels)} entries, but 'input_ids' has {len(ids)}; give one per token.")
    if any(-100 < label < 0 for label in labels):
        raise UserError("'labels' has a negative entry other than -100, which marks tokens that are not trained on.")
    mask = _list(row, "attention_mask")
    if mask is not None and _integers(mask, "attention_mask", least=0) != [1] * len(ids):
        raise UserError("'attention_mask' must be 1 for every token; remove the padding, rows are packed later.")
    return Tokens(ids, labels)


def _integers(value: Any, name: str, least: int) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int and least <= item < 2**31 for item in value):
        raise UserError(f"'{name}' must be a list of integers from {least} to 2^31 - 1.")
    return value


def _conversation(messages: list[dict[str, Any]], first_trained: int, row: dict[str, Any]) -> Conversation:
    trained = frozenset(
        i for i, message in enumerate(messages)
        if i >= first_trained and message["role"] == "assistant" and message.get("weight", 1)
    )  # fmt: skip
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise UserError(f"'chat_template_kwargs' is {kind_of(kwargs)}, but must be an object.")
    return Conversation(messages, trained, _tools(row.get("tools")), kwargs)


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise UserError(f"'{name}' is {kind_of(value)}, but must be a list of at least one message.")
    return [_message(message, f"'{name}[{i}]'") for i, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"{where} is {kind_of(message)}, but a message is an object with 'role' and 'content'.")
    role = message.get("role")
    if role not in ROLES:
        meant = OTHER_ROLES.get(role.lower()) if isinstance(role, str) else None
        hint = f"; write {meant!r}" if meant else ""
        raise UserError(f"{where} has the role {role!r:.80}, but the roles are {', '.join(ROLES)}{hint}.")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UserError(f"{where} has 'tool_calls' that are not a list of objects.")
    if message.get("weight", 1) not in (0, 1):
        raise UserError(f"{where} has the weight {message['weight']!r}, but it must be 0 (do not train on it) or 1.")
    checked = {**message, "content": _content(message.get("content"), where, may_be_null=bool(calls))}
    if calls:
        checked["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return checked


def _content(value: Any, where: str, may_be_null: bool) -> str | None:
    """A message's text. Lists of text parts are joined, since not every template supports them."""
    if isinstance(value, str) or (value is None and may_be_null):
        return value
    if not isinstance(value, list):
        raise UserError(f"{where} has {kind_of(value)} for content, but it must be a string or a list of text parts.")
    for part in value:
        if not (isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)):
            raise UserError(f'{where} has a content part that is not {{"type": "text", "text": ...}}.')
    return "".join(part["text"] for part in value)


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    # OpenAI's format has a call's arguments as JSON in a string; chat templates expect an object.
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str) and value.strip():  # JSON in a string, in tables whose columns have a single type
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError("'tools' is a string that is not valid JSON; give a list of JSON schemas.") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError(f"'tools' is {kind_of(value)}, but must be a list of JSON schemas.")
    return value


def _sharegpt(row: dict[str, Any]) -> Conversation:
    given = _list(row, "conversations")
    turns: Sequence[Any] = given if isinstance(given, list) else ()
    if not turns:
        raise UserError(f"'conversations' is {kind_of(given)}, but must be a list of at least one turn.")
    messages = []
    for i, turn in enumerate(turns):
        if isinstance(turn, dict) and "from" in turn:
            role = turn["from"]
            if not isinstance(role, str) or role not in _SHAREGPT_ROLES:
                raise UserError(
                    f"'conversations[{i}]' is from {role!r}, but the roles are {', '.join(_SHAREGPT_ROLES)}."
                )
            turn = {"role": _SHAREGPT_ROLES[role], "content": turn.get("value")}
        messages.append(_message(turn, f"'conversations[{i}]'"))
    system = _string(row, "system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return _conversation(messages, 0, row)
