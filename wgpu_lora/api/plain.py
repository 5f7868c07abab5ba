"""Values of options as the command line has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError


def plain(value: Any, name: str, where: str) -> Any:
    """Convert a path to text.

    Raises:
        UserError: the value is an empty text.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) and not value.strip():
        raise UserError(f"{where}: '{name}' is empty: give it a value, or leave it out.")
    return value
