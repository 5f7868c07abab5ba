"""Paths of the package's data files: inside the package or, in a checkout, beside it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
ROOT = _PACKAGE.parent  # the checkout or site-packages; child processes need it on their path

DEMO_MODEL = _PACKAGE / "demo" / "model"
DEMO_TRAIN = _PACKAGE / "demo" / "data" / "train.jsonl"
DEMO_HELDOUT = _PACKAGE / "demo" / "data" / "heldout.jsonl"


@cache
def asset_dir(name: str) -> Path:
    """Path of the folder `shaders`, `recipes` or `bricks` in this installation."""
    inside = _PACKAGE / "_assets" / name
    return inside if inside.is_dir() else ROOT / name


@cache
def shader_text(name: str) -> str:
    return (asset_dir("shaders") / name).read_text(encoding="utf-8")
