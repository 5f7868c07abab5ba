"""JSON values of rows."""

from __future__ import annotations

from typing import Any


def kind_of(value: Any) -> str:
    """The kind of a JSON value, for messages."""
    if isinstance(value, list | dict):
        name = "list" if isinstance(value, list) else "object"
        return f"an empty {name}" if not value else "a list" if name == "list" else "an object"
    if isinstance(value, float) and value != value:
        return "NaN (a table's empty cell?)"
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), type(value).__name__)


def dense(value: Any) -> Any:
    """A value without the null fields of its objects, since tables give every object all fields."""
    if isinstance(value, dict):
        return {key: dense(item) for key, item in value.items() if item is not None}
    return [dense(item) for item in value] if isinstance(value, list) else value
