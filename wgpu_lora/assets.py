"""Where the package's files are: inside it or, in a checkout, some of them beside it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
ROOT = _PACKAGE.parent  # what a child has to have on its path: the checkout, or site-packages

DEMO_MODEL = _PACKAGE / "demo" / "model"
DEMO_TRAIN = _PACKAGE / "demo" / "data" / "train.jsonl"
DEMO_HELDOUT = _PACKAGE / "demo" / "data" / "heldout.jsonl"


@cache
def asset_dir(name: str) -> Path:
    """The folder `shaders`, `recipes` or `bricks`, wherever this installation keeps it."""
    inside = _PACKAGE / "_assets" / name
    return inside if inside.is_dir() else ROOT / name


@cache
def shader_text(name: str) -> str:
    return (asset_dir("shaders") / name).read_text(encoding="utf-8")
