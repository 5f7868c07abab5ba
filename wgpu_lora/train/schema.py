"""The schema of everything that a run writes to resume from or to be read later: one number, and who may read it.

Schema 1 is that of version 0.1.0, whose files carry no number. This version writes SCHEMA and reads it and the one
before. What a file lacks because an earlier version did not know it has its default; a newer file is refused.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.tiling import Tiling

SCHEMA = 2
T = TypeVar("T")


class NewerSchemaError(UserError):
    """A file of a newer version, which is not damaged and must not be taken for it."""


def schema_of(facts: Any, path: Path) -> int:
    """The schema of the JSON that a file holds.

    Raises:
        NewerSchemaError: this version does not know it. ValueError: it is none.
    """
    if not isinstance(facts, dict):
        raise ValueError(f"{path.name} holds no object")
    found = facts.get("schema", 1)
    if type(found) is not int or found < 1:
        raise ValueError(f"the schema of {path.name} is {found!r:.40}")
    if found > SCHEMA:
        raise NewerSchemaError(
            f"{path} was written by a newer version of wgpu-lora (schema {found}, and this version reads up to "
            f"{SCHEMA}): update wgpu-lora."
        )
    return found


def typed(kind: Any, value: Any, name: str = "the record") -> Any:
    """A value from JSON as the type that an annotation names: dataclasses of numbers, texts, lists and dicts.

    Fields that a dict lacks have their defaults; those that the dataclass does not know are left out.

    Raises:
        ValueError: it is of another type, or lacks a field without a default; named by `name`.
    """
    if kind is Any or kind is object:
        return value
    if isinstance(kind, UnionType):
        if value is None and NoneType in get_args(kind):
            return None
        return typed(next(one for one in get_args(kind) if one is not NoneType), value, name)
    if kind is Tiling:  # which version 0.1.0 wrote in another form
        return Tiling.from_json(value)
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _built(kind, _of(dict, value, name), name)
    if origin is dict:
        return {key: typed(parts[1], item, f"{name}.{key}") for key, item in _of(dict, value, name).items()}
    if origin is list:
        return [typed(parts[0], item, f"{name}[{i}]") for i, item in enumerate(_of(list, value, name))]
    if kind is float and type(value) is int:
        return float(value)
    return _of(kind, value, name)


def _built(kind: type[T], values: dict[str, Any], name: str) -> T:
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
