"""Where the shader files are: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


@cache
def asset_dir(name: str) -> Path:
    """The folder `shaders` or `recipes`, wherever this installation keeps it."""
    inside = _PACKAGE / "_assets" / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


@cache
def shader_text(name: str) -> str:
    return (asset_dir("shaders") / name).read_text(encoding="utf-8")
