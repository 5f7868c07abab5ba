"""The files of this package, by names that are the same for a checkout and for the wheel that is built from it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from wgpu_lora import assets

PACKAGE = assets.DEMO_MODEL.parent.parent
ASSETS = ("shaders", "recipes", "bricks")
CACHES = "__pycache__"


def package_files(package: Path = PACKAGE) -> dict[str, Path]:
    """All files by name, without compiled ones. Raises OSError if a folder cannot be read."""
    files = {f"wgpu_lora/{name}": path for name, path in walk(package, ("_assets",))}
    for folder in ASSETS:
        files |= {f"{folder}/{name}": path for name, path in walk(assets.asset_dir(folder))}
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
