"""The schema of everything that a run writes to resume from or to be read later: one number, and who may read it.

Schema 1 is that of version 0.1.0, whose files carry no number. This version writes SCHEMA and reads it and the one
before. What a file lacks because an earlier version did not know it has its default; a newer file is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError

SCHEMA = 2


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
