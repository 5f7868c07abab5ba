"""Validation of conversations in the formats of OpenAI and ShareGPT."""

from __future__ import annotations

import json
from typing import Any

from wgpu_lora.data.guesses import OTHER_ROLES
from wgpu_lora.data.values import kind_of
from wgpu_lora.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"} | {role: role for role in ROLES}


def checked_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Messages with contents that are text. Raises UserError, which names the column and the message."""
    if not isinstance(value, list) or not value:
        raise UserError(f"'{name}' is {kind_of(value)}, but must be a list of at least one message.")
    return [_message(message, f"'{name}[{i}]'") for i, message in enumerate(value)]


def checked_turns(value: Any, name: str) -> list[dict[str, Any]]:
    """The messages of turns with `from` and `value`, as ShareGPT has them. Raises UserError."""
    if not isinstance(value, list) or not value:
        raise UserError(f"'{name}' is {kind_of(value)}, but must be a list of at least one turn.")
    messages = []
    for i, turn in enumerate(value):
        if isinstance(turn, dict) and "from" in turn:
            role = turn["from"]
            if not isinstance(role, str) or role not in _SHAREGPT_ROLES:
                raise UserError(f"'{name}[{i}]' is from {role!r}, but the roles are {', '.join(_SHAREGPT_ROLES)}.")
            turn = {"role": _SHAREGPT_ROLES[role], "content": turn.get("value")}
        messages.append(_message(turn, f"'{name}[{i}]'"))
    return messages


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
