"""Check JSON and TOML values against types: dataclasses, whose fields may have limits, by pydantic in strict mode.

pydantic is imported when the first value is checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Lt

from wgpu_lora.errors import UserError
from wgpu_lora.names.aliases import advice
from wgpu_lora.names.spelling import IN_FILE, naming
from wgpu_lora.names.text import escape_unprintable, join_words

T = TypeVar("T")
Unknown = Literal["refuse", "ignore"]
Count = Annotated[int, Ge(0), Lt(1 << 53)]
Positive = Annotated[int, Ge(1), Lt(1 << 53)]
Seconds = Annotated[float, Ge(0)]
Scale = Annotated[float, Gt(0)]
_MUST_BE = re.compile("Input should be |Value error, must be ")
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
# What a value must be, by the kind of pydantic's error; the others say it well.
_WORDS = {
    "string_type": "text", "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false",
    "dict_type": "an object", "dataclass_type": "an object", "list_type": "a list", "tuple_type": "a list",
}  # fmt: skip


class FromJson:
    """Annotates a type that reads its values itself, by its `from_json`, such as those of earlier versions."""

    def __get_pydantic_core_schema__(self, kind: Any, _: Any) -> Any:
        from pydantic_core.core_schema import no_info_plain_validator_function

        return no_info_plain_validator_function(kind.from_json)


class Check:
    """Annotates a value with a further condition: `wanted` is what it must be, in words."""

    def __init__(self, fits: Callable[[Any], bool], expected: str):
        self._fits, self._expected = fits, expected

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(self._checked, handler(kind))

    def _checked(self, value: Any) -> Any:
        if not self._fits(value):
            raise ValueError(f"must be {self._expected}")
        return value


Text = Annotated[str, Check(str.strip, "text that is not empty")]
SHA256 = re.compile(r"[0-9a-f]{64}")
Sha256 = Annotated[str, Check(SHA256.fullmatch, "the 64 lower-case hexadecimal digits of a SHA-256")]


def read_as(kind: type[T], value: Any, where: str, unknown: Unknown = "refuse") -> T:
    """A value as `kind`, as `typed` returns it.

    Args:
        where: what the value is of; begins the message.

    Raises:
        UserError: the value does not have the type.
    """
    try:
        return typed(kind, value, unknown=unknown)  # type: ignore[no-any-return]
    except ValueError as error:
        text = str(error)
        end = ": add it." if text.endswith(" is missing") else "." if text[-1:] not in ".?" else ""
        raise UserError(f"{where}: {text}{end}") from None


def typed(kind: Any, value: Any, name: str = "the record", unknown: Unknown = "ignore") -> Any:
    """A JSON value as a type: a dataclass, a number, a text, or lists, objects and unions of them.

    A whole number is also a `float`; nothing else is converted. Missing fields get their defaults.

    Args:
        name: of the value, for errors. unknown: fields that a dataclass does not have are refused, as in what people
            write, or ignored, as in records, to which later versions add.

    Raises:
        ValueError: the value has another type, is beyond a limit, or lacks a field without a default; the message is
            part of a sentence.
    """
    if kind is Any or kind is object:
        return value
    from pydantic import ValidationError

    try:
        return _adapter(kind, unknown).validate_json(json.dumps([value], default=_no_json))[0]
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
    raise ValueError(_sentence(kind, value, name, problems))


@cache
def _adapter(kind: Any, unknown: Unknown) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    extra: Any = "forbid" if unknown == "refuse" else "ignore"
    # In a tuple, since a dataclass alone takes no configuration from elsewhere.
    return TypeAdapter(tuple[kind], config=ConfigDict(strict=True, extra=extra, allow_inf_nan=False))


def _no_json(value: Any) -> Any:
    """A date of TOML, or another value that JSON does not have, which fits no type."""
    return {"": str(value)}


def _sentence(kind: Any, value: Any, name: str, problems: Sequence[Any]) -> str:
    """The first problem: an unknown field, whose missing one it may be, before others."""
    first = min(problems, key=lambda problem: problem["type"] not in _UNKNOWN)
    path, result = _located(value, first)
    below = "".join(f"[{part}]" if isinstance(part, int) else f".{escape_unprintable(part)[:60]}" for part in path)
    label = f"{name[:-1]}{below}'" if name.startswith("'") else f"'{below.removeprefix('.')}'" if below else name
    if first["type"] == "missing":
        return f"{label} is missing"
    if first["type"] in _UNKNOWN:
        names = [field.name for field in fields(_at(kind, path[:-1])) if field.init]
        with naming(IN_FILE):
            return (
                f"{label} is not known: {advice(str(path[-1]).replace('-', '_'), names, f'use {join_words(names)}.')}"
            )
    alike = [problem for problem in problems if _located(value, problem)[0] == path]
    texts = dict.fromkeys(_WORDS.get(problem["type"]) or _wording(problem["msg"]) for problem in alike)
    if "a number" in texts:
        texts.pop("a whole number", None)
    if first["type"] in _WORDS or _MUST_BE.match(first["msg"]):
        *alternatives, last = texts
        expected = f"{', '.join(alternatives)} or {last}" if alternatives else last
        return f"{label} must be {expected}, not {_value_text(result)}"
    return f"{label} is {_value_text(result)} ({first['msg'].removeprefix('Value error, ')})"


def _wording(message: str) -> str:
    text = _MUST_BE.sub("", message)
    return text.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


def _value_text(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _located(value: Any, problem: Any) -> tuple[list[str | int], Any]:
    """The path to a problem in a value, and the value there; pydantic's paths have names of a union's types, too."""
    path: list[str | int] = []
    for part in problem["loc"][1:]:
        if (isinstance(value, dict) and part in value) or (
            isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        ):
            value = value[part]
        elif problem["type"] != "missing" or part != problem["loc"][-1]:
            continue
        path.append(part)
    return path, value


def _at(kind: Any, path: Sequence[str | int]) -> Any:
    """The dataclass at a path of values."""
    if is_dataclass(kind):
        return _at(get_type_hints(kind)[str(path[0])], path[1:]) if path else kind
    item = next(part for part in get_args(kind) if part not in (str, type(None)))
    return _at(item, path[1:] if get_origin(kind) in (dict, list, tuple) else path)
