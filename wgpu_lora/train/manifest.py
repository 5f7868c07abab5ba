"""The SHA-256 of every file of a checkpoint: written last, and checked before any file is used."""

from __future__ import annotations

import re
from pathlib import Path

from wgpu_lora.atomic import file_digest
from wgpu_lora.bounded import read_json
from wgpu_lora.errors import UserError
from wgpu_lora.strict_json import to_json

MANIFEST = "manifest.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def write_manifest(directory: Path) -> None:
    """Write the manifest of all files in a directory."""
    files = {path.name: file_digest(path) for path in sorted(directory.iterdir())}
    (directory / MANIFEST).write_text(_text(files))


def _text(files: dict[str, str]) -> str:
    return to_json({"sha256": files}, indent=1) + "\n"


def damage(directory: Path, needed: tuple[str, ...]) -> str | None:
    """What is wrong with a directory that has a manifest; None if it is intact.

    Files that the manifest does not name are ignored, since operating systems add some.

    Args:
        needed: files that the manifest must name.
    """
    if not (directory / MANIFEST).exists():
        return f"{MANIFEST} is missing"
    try:
        files = read_json(directory / MANIFEST).get("sha256")
        as_written = isinstance(files, dict) and (directory / MANIFEST).read_text() == _text(files)
    except UserError as error:
        return f"{MANIFEST} cannot be read ({error.problem})"
    if not isinstance(files, dict) or not as_written or not set(needed) <= set(files):
        return f"{MANIFEST} is not valid"
    for name, digest in files.items():
        if Path(name).name != name or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            return f"{MANIFEST} is not valid"
        try:
            if not (directory / name).is_file():
                return f"{name} is missing"
            if file_digest(directory / name) != digest:
                return f"{name} has changed (its SHA-256 differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None
