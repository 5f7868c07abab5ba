"""The normal form of a conversation: OpenAI's messages with `tool_calls`, from every spelling that rows have.

A turn is an object with `role` and `content` (OpenAI, TRL), or with `from` and `value` (ShareGPT, LLaMA-Factory); its
other fields mean the same in both. `weight` 0 says that a turn is not trained on, as do `train`, `training`,
`trainable`, `train_on_turn`, `loss` and `loss_mask` with false. Other keys are for the chat template, and those that it
does not render are named; one that may say what is trained on is refused. OpenAI's older `function_call`, `functions`
and role `function` become `tool_calls`, `tools` and role `tool`; null is a missing value everywhere but in arguments.
"""

from __future__ import annotations

import json
from typing import Any

from wgpu_lora.data.json_values import kind_of
from wgpu_lora.data.row_formats import OTHER_ROLES
from wgpu_lora.data.unread_columns import is_empty, refusal
from wgpu_lora.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
_OPENAI_ROLES = {role: role for role in ROLES} | {"function": "tool"}
_CALLS = ("function_call", "tool_call")  # ShareGPT's roles of turns whose value is the JSON of a call
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "tool_response": "tool"}
_SHAREGPT_ROLES |= dict.fromkeys(_CALLS, "assistant") | _OPENAI_ROLES
TRAINED = ("weight", "train", "training", "trainable", "train_on_turn", "loss", "loss_mask")
_PART_KEYS = ("type", "text", "cache_control")


def checked_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Messages in the normal form, whose contents are text; null contents only beside tool calls.

    Raises:
        UserError: a message is wrong; names the column and the message.
    """
    if not isinstance(value, list) or not value:
        raise UserError(f"'{name}' is {kind_of(value)}, but must be a list of at least one message.")
    return [_message(message, f"'{name}[{i}]'") for i, message in enumerate(value)]


def checked_tools(value: Any, name: str) -> list[dict[str, Any]] | None:
    """JSON schemas of tools, as they are given; None without any. Raises UserError."""
    value = _parsed(value, f"'{name}' is a string that is not valid JSON; give a list of JSON schemas.")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError(f"'{name}' is {kind_of(value)}, but must be a list of JSON schemas.")
    return value


def checked_functions(value: Any, name: str) -> list[dict[str, Any]] | None:
    """The tools that OpenAI's older column `functions` declares. Raises UserError."""
    functions = checked_tools(value, name)
    return functions and [
        function if "function" in function else {"type": "function", "function": function} for function in functions
    ]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"{where} is {kind_of(message)}, but a message is an object with 'role' and 'content'.")
    fields = {key: value for key, value in message.items() if value is not None}
    turn = "from" in fields and ("value" in fields or "role" not in fields)
    name = fields.pop("from" if turn else "role", None)
    content = fields.pop("value", fields.get("content")) if turn or "content" not in fields else fields["content"]
    role = _role(name, _SHAREGPT_ROLES if turn else _OPENAI_ROLES, where, turn)
    weight = _weight(fields, where)
    for key, value in fields.items():
        if not is_empty(value) and (wrong := refusal(key, value)):
            raise UserError(f"{where}: {wrong}.")
    calls = _calls(fields, where)
    if turn and name in _CALLS:
        wrong = f"{where} is from {name!r}, but its value is not the JSON of a call with 'name' and 'arguments'."
        values = _parsed(content, wrong)
        values = values if isinstance(values, list) else [values]
        if not values or not all(isinstance(call, dict) and _name_of(call) for call in values):
            raise UserError(wrong)
        calls, content = [*calls, *(_checked_call(c) if "function" in c else _function_call(c) for c in values)], None
    checked = {**fields, "role": role, "content": _content(content, where, may_be_null=bool(calls))}
    checked |= {"tool_calls": calls} if calls else {}
    return checked if weight is None else {**checked, "weight": weight}


def _role(name: Any, roles: dict[str, str], where: str, turn: bool) -> str:
    if isinstance(name, str) and name in roles:
        return roles[name]
    if name is None:
        raise UserError(f"{where} has no role; give it one of {', '.join(roles)}.")
    low = name.lower().strip() if isinstance(name, str) else ""
    suggestion = OTHER_ROLES.get(low) or (low if low in roles else None)
    if turn and suggestion:
        suggestion = {"user": "human", "assistant": "gpt"}.get(suggestion, suggestion)
    hint = f"; write {suggestion!r}" if suggestion else ""
    verb = "is from" if turn else "has the role"
    raise UserError(f"{where} {verb} {name!r:.80}, but the roles are {', '.join(roles)}{hint}.")


def _weight(fields: dict[str, Any], where: str) -> int | None:
    """1 if a turn is trained on, 0 if not, None if it does not say; removes the fields that say so."""
    marks = {name: fields.pop(name) for name in TRAINED if name in fields}
    for name, value in marks.items():
        if type(value) not in (bool, int, float) or value not in (0, 1):
            text, expected = json.dumps(value, default=repr)[:80], "0 (do not train on it) or 1"
            if name != "weight":
                raise UserError(f"{where} has {name!r}: {text}, but it must be true or false.")
            raise UserError(f"{where} has the weight {text}, but it must be {expected}.")
    if len({int(value) for value in marks.values()}) > 1:
        raise UserError(f"{where} has {' and '.join(map(repr, marks))}, which contradict each other; keep 'weight'.")
    return int(next(iter(marks.values()))) if marks else None


def _content(value: Any, where: str, may_be_null: bool) -> str | None:
    """A message's text. Lists of text parts are joined, since not every template supports them."""
    if isinstance(value, str) or (value is None and may_be_null):
        return value
    if not isinstance(value, list):
        raise UserError(f"{where} has {kind_of(value)} for content, but it must be a string or a list of text parts.")
    for part in value:
        if not (isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)):
            kind = f", but {part['type']!r:.40}" if isinstance(part, dict) and "type" in part else ""
            raise UserError(f'{where} has a content part that is not {{"type": "text", "text": ...}}{kind}.')
        if unread := [key for key, item in part.items() if key not in _PART_KEYS and not is_empty(item)]:
            raise UserError(f"{where} has a content part with {unread[0]!r:.80}, which is not read; remove it.")
    return "".join(part["text"] for part in value)


def _calls(fields: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The tool calls of a message; removes `tool_calls` and `function_call`."""
    calls, older = fields.pop("tool_calls", None) or [], fields.pop("function_call", None)
    calls = _parsed(calls, f"{where} has 'tool_calls' that are not a list of objects.")
    if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UserError(f"{where} has 'tool_calls' that are not a list of objects.")
    if older is None or (isinstance(older, dict) and not any(older.values())):
        if nameless := [call for call in calls if not _name_of(call)]:
            text = json.dumps(nameless[0], default=repr)[:80]
            raise UserError(f"{where} has a tool call without the name of a function, {text}.")
        return [_checked_call(call) if "function" in call else _function_call(call) for call in calls]
    if not isinstance(older, dict) or not _name_of(older):
        raise UserError(f"{where} has a 'function_call' that is not an object with 'name' and 'arguments'.")
    if calls:
        raise UserError(f"{where} has both 'tool_calls' and 'function_call'; keep 'tool_calls'.")
    return [_function_call(older)]


def _name_of(call: dict[str, Any]) -> str | None:
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _function_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call in OpenAI's form, of one that states the name and the arguments (or `parameters`) itself."""
    function = {key: value for key, value in call.items() if key not in ("id", "type")}
    if "arguments" not in function:
        function["arguments"] = function.pop("parameters", None)
    outer = {"id": call["id"]} if "id" in call else {}
    return _checked_call({**outer, "type": "function", "function": function})


def _checked_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object or its JSON text, which `chat_template.render` treats alike."""
    arguments = call["function"].get("arguments")
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _parsed(value: Any, wrong: str) -> Any:
    """A value, which may be given as a string with its JSON. Raises UserError with the text `wrong`."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(wrong) from error
