"""Types of columns: text, messages, tokens, numbers."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from wgpu_lora.data.json_values import kind_of
from wgpu_lora.data.messages import checked_functions, checked_messages, checked_tools
from wgpu_lora.data.row_formats import ColumnType
from wgpu_lora.errors import UserError

_MAX_NUMBER = 3.4028234e38  # of f32
_FLAGS: dict[Any, bool] = {"true": True, "false": False, "1": True, "0": False, 1: True, 0: False}


def _identity(value: Any, name: str) -> Any:
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"'{name}' is {kind_of(value)}, but must be a string.")
    return value


def _text_or_messages(value: Any, name: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UserError(f"'{name}' is {kind_of(value)}, but must be a string or a list of messages.")
    return checked_messages(value, name)


def _messages_in(cell: str) -> Any:
    """The messages in a cell of CSV, which can hold them only as JSON; other text as it is."""
    if not cell.lstrip().startswith("[") or '"role"' not in cell:
        return cell
    try:
        result = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    return result if result and all(isinstance(item, dict) and "role" in item for item in result) else cell


def _list(value: Any, name: str) -> Any:
    """A list or an object, which may be given as a string with its JSON."""
    if not isinstance(value, str) or not value.strip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"'{name}' is a string that is not valid JSON; give a list, or the output of json.dumps."
        ) from error


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    return checked_messages(_list(value, name), name)


def _integers(value: Any, name: str, minimum: int) -> list[int]:
    result = _list(value, name)
    if not isinstance(result, list) or not all(type(item) is int and minimum <= item < 2**31 for item in result):
        raise UserError(f"'{name}' must be a list of integers from {minimum} to 2^31 - 1.")
    return result


def _mask(value: Any, name: str) -> list[int]:
    result = _list(value, name)
    if not isinstance(result, list) or not all(isinstance(item, int | float) and item in (0, 1) for item in result):
        raise UserError(f"'{name}' must be a list of 1 for tokens that are trained on, and 0 for others.")
    return [int(item) for item in result]


def _number(value: Any, name: str) -> float:
    try:
        result = float(value) if type(value) in (int, float, str) else None
    except (ValueError, OverflowError):
        result = None
    if result is None or not abs(result) <= _MAX_NUMBER:
        text = f"{value!r:.40}" if isinstance(value, str | float) and value == value else kind_of(value)
        raise UserError(f"'{name}' is {text}, but must be a finite number.")
    return result


def _flag(value: Any, name: str) -> bool:
    word = value.strip().lower() if isinstance(value, str) else value
    result = _FLAGS.get(word) if isinstance(word, str | int | float) else None
    if result is None:
        text = f"{value!r:.40}" if isinstance(value, str) else kind_of(value)
        raise UserError(f"'{name}' is {text}, but must be true or false.")
    return result


def _object(value: Any, name: str) -> dict[str, Any]:
    if value and not isinstance(value, dict):
        raise UserError(f"'{name}' is {kind_of(value)}, but must be an object.")
    return value or {}


def _count(value: Any, name: str) -> int:
    number = _number(value, name)
    if number < 0 or number != int(number):
        raise UserError(f"'{name}' is {value!r:.40}, but must be a number of tokens.")
    return int(number)


def _turns(value: Any, name: str) -> list[list[str]]:
    """Earlier turns, as pairs of a question and its answer (LLaMA-Factory's `history`)."""
    turns = _list(value, name)
    if not isinstance(turns, list) or not all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn) for turn in turns
    ):
        raise UserError(f"'{name}' must be a list of turns, each a list of a question and its answer.")
    return turns


def _answer(value: Any, name: str) -> list[dict[str, Any]]:
    """An answer as messages: one message, a list of them, or the text of the assistant's."""
    if isinstance(value, str) and not value.lstrip().startswith(("{", "[")):
        return [{"role": "assistant", "content": value}]
    answer = _list(value, name)
    return checked_messages([answer] if isinstance(answer, dict) else answer, name)


ANYTHING = ColumnType(_identity)
TEXT = ColumnType(_text, is_text=True)
TEXT_OR_MESSAGES = ColumnType(_text_or_messages, is_text=True, cell=_messages_in)
MESSAGES = ColumnType(_messages)  # objects with role and content, or with from and value
ANSWER = ColumnType(_answer)
TURNS = ColumnType(_turns)
TOKENS = ColumnType(partial(_integers, minimum=0))
MASK = ColumnType(_mask)  # a list of 0 and 1
COUNT = ColumnType(_count)
LABELS = ColumnType(partial(_integers, minimum=-100))
NUMBER = ColumnType(_number)
FLAG = ColumnType(_flag)  # true or false
OBJECT = ColumnType(_object)
TOOLS = ColumnType(checked_tools)
FUNCTIONS = ColumnType(checked_functions)  # OpenAI's older name of tools
