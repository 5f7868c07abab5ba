"""Paths of the package's data files: inside the package or, in a checkout, beside it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
ROOT = _PACKAGE.parent  # the checkout or site-packages; child processes need it on their path

DEMO_MODEL = _PACKAGE / "demo" / "model"
DEMO_TRAIN = _PACKAGE / "demo" / "data" / "train.jsonl"
DEMO_HELDOUT = _PACKAGE / "demo" / "data" / "heldout.jsonl"
ORDERS_TRAIN = _PACKAGE / "demo" / "data" / "orders.jsonl"
ORDERS_HELDOUT = _PACKAGE / "demo" / "data" / "orders-heldout.jsonl"


@cache
def asset_dir(name: str) -> Path:
    """Path of the folder `shaders`, `recipes` or `bricks` in this installation."""
    inside = _PACKAGE / "_assets" / name
    return inside if inside.is_dir() else ROOT / name


@cache
def shader_text(name: str) -> str:
    return (asset_dir("shaders") / name).read_text(encoding="utf-8")


PACKAGE = DEMO_MODEL.parent.parent
ASSETS = ("shaders", "recipes", "bricks")
CACHES = "__pycache__"


def package_files(package: Path = PACKAGE) -> dict[str, Path]:
    """All files by name, without compiled ones. Raises OSError if a folder cannot be read."""
    files = {f"wgpu_lora/{name}": path for name, path in walk(package, ("_assets",))}
    for folder in ASSETS:
        files |= {f"{folder}/{name}": path for name, path in walk(asset_dir(folder))}
    return dict(sorted(files.items()))


def combined(digests: Mapping[str, str]) -> str:
    """One SHA-256 over files: of lines "digest  name", as sha256sum prints them, sorted by name."""
    lines = (f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def walk(root: Path, without: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    """(name relative to the root, path) of all files, except compiled ones. Raises OSError if a folder cannot be read.

    without: names of folders to leave out.
    """
    for folder, folders, names in os.walk(root, onerror=_stop):
        folders[:] = sorted(set(folders) - {CACHES, *without})
        for name in names:
            path = Path(folder, name)
            if path.is_file():
                yield path.relative_to(root).as_posix(), path


def _stop(error: OSError) -> None:
    raise error
