"""JSON values of rows."""

from __future__ import annotations

import hashlib
import json
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
    """A value without the null fields of its objects, since tables give every object all fields.

    Those of a tool call's arguments are kept, since they mean something in JSON.
    """
    if isinstance(value, dict):
        return {key: item if key == "arguments" else dense(item) for key, item in value.items() if item is not None}
    return [dense(item) for item in value] if isinstance(value, list) else value


def canonical(row: Any) -> bytes:
    """A row as JSON in UTF-8 that does not depend on the order of its keys.

    Raises:
        UnicodeEncodeError: a text has a lone surrogate. ValueError, RecursionError: JSON cannot hold it.
    """
    return json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=repr).encode()


def row_digest(text: bytes) -> bytes:
    """12 bytes that identify a row, by its canonical JSON."""
    return hashlib.blake2b(text, digest_size=12).digest()
