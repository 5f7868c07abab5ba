"""The schema of a run's files, and which versions can read them.

Schema 1 is that of version 0.1.0, whose files have no number. In schema 3, the state of a run has its elapsed
time, and in schema 4 the step at which its learning-rate schedule starts.
This version writes SCHEMA, and reads it and those before. Values missing in an older file have their defaults; a newer
file is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError

SCHEMA = 4


class NewerSchemaError(UserError):
    """A file from a newer version, which must not be treated as damaged."""


def schema_of(facts: Any, path: Path) -> int:
    """The schema of a file's JSON.

    Raises:
        NewerSchemaError: it is newer than this version. ValueError: it is invalid.
    """
    if not isinstance(facts, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    found = facts.get("schema", 1)
    if type(found) is not int or found < 1:
        raise ValueError(f"the schema of {path.name} is {found!r:.40}")
    if found > SCHEMA:
        raise NewerSchemaError(
            f"{path} was written by a newer version of wgpu-lora (schema {found}, and this version reads up to "
            f"{SCHEMA}): update wgpu-lora."
        )
    return found
