"""Standard JSON, without the NaN and Infinity that Python's writer emits, and checks of values against types."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_json(value: Any, **options: Any) -> str:
    """`json.dumps(value, **options)`, with null for every non-finite number."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def typed(kind: Any, value: Any, name: str = "the record") -> Any:
    """Convert a JSON value to the type of an annotation: dataclasses of numbers, strings, lists and dicts.

    Missing fields get their defaults, unknown fields are ignored. A type with a `from_json` method reads the value
    itself.

    Raises:
        ValueError: the value, called `name`, has another type or lacks a field without a default.
    """
    if kind is Any or kind is object:
        return value
    if isinstance(kind, UnionType):
        return _either(get_args(kind), value, name)
    if hasattr(kind, "from_json"):  # reads the formats of earlier versions
        return kind.from_json(value)
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return built(kind, value, name)
    if origin is dict:
        return {key: typed(parts[1], item, f"{name}.{key}") for key, item in _of(dict, value, name).items()}
    if origin is list:
        return [typed(parts[0], item, f"{name}[{i}]") for i, item in enumerate(_of(list, value, name))]
    if kind is float and type(value) in (int, float):
        return _number(value, name)
    return _of(kind, value, name)


_WORDS: dict[Any, str] = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "an object", list: "a list",
    list[str]: "a list of text", list[dict[str, Any]]: "a list of objects", NoneType: "null",
}  # fmt: skip


def in_words(kind: Any) -> str:
    """The JSON values of an annotation, such as `text, a whole number or null`."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    *most, last = [_WORDS.get(one) or _WORDS.get(get_origin(one)) or str(one) for one in kinds]
    return f"{', '.join(most)} or {last}" if most else last


def _number(value: float, name: str) -> float:
    """A finite float: the writer has no other."""
    try:
        if math.isfinite(found := float(value)):
            return found
    except OverflowError:
        pass
    raise ValueError(f"{name} is {value!r:.40}")


def _either(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    """Convert to the first type that fits; the error is that of the first type."""
    if value is None and NoneType in kinds:
        return None
    wrong: list[ValueError] = []
    for kind in kinds:
        if kind is not NoneType:
            try:
                return typed(kind, value, name)
            except ValueError as error:
                wrong.append(error)
    raise wrong[0]


def built(kind: type[T], value: Any, name: str = "the record") -> T:
    """The same for a dataclass, by its fields."""
    values: dict[str, Any] = _of(dict, value, name)
    hints, found = get_type_hints(kind), {}
    for item in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if item.name in values:
            found[item.name] = typed(hints[item.name], values[item.name], item.name)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"'{item.name}' is missing")
    return kind(**found)


def _of(kind: type[T], value: Any, name: str) -> T:
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r:.40}")
    return value
