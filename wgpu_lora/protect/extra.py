"""Libraries of the extra `protect`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from wgpu_lora.errors import UserError

EXTRAS = {"tpm2_pytss": "tpm"}  # of libraries that are not in `protect`


def library(name: str) -> ModuleType:
    """Import a library of an extra.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        extra = EXTRAS.get(name.partition(".")[0], "protect")
        missing = error.name or name
        raise UserError(
            f"Protected training needs the library {missing}, which is not installed: run pip install "
            f"'wgpu-lora[{extra}]'."
        ) from None
