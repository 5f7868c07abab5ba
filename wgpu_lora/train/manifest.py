"""The SHA-256 of every file of a checkpoint: written last, and checked before any file is used."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from wgpu_lora.atomic import file_digest
from wgpu_lora.bounded import parse_object
from wgpu_lora.errors import UserError
from wgpu_lora.strict_json import to_json
from wgpu_lora.train.storage import PLAIN, Storage

MANIFEST = "manifest.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def manifest_of(files: Mapping[str, bytes]) -> bytes:
    """The manifest of files by name."""
    return _text({name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)}).encode()


def write_manifest(directory: Path) -> None:
    """Write the manifest of all files in a directory."""
    files = {path.name: file_digest(path) for path in sorted(directory.iterdir())}
    (directory / MANIFEST).write_text(_text(files))


def _text(files: dict[str, str]) -> str:
    return to_json({"sha256": files}, indent=1) + "\n"


def damage(directory: Path, needed: tuple[str, ...], storage: Storage = PLAIN) -> str | None:
    """What is wrong with a directory that has a manifest; None if it is intact.

    Files that the manifest does not name are ignored, since operating systems add some.

    Args:
        needed: files that the manifest must name.
    """
    manifest = directory / MANIFEST
    if not storage.is_file(manifest):
        return f"{MANIFEST} is missing"
    try:
        data = storage.read(manifest)
        files = parse_object(data, str(manifest)).get("sha256")
        as_written = isinstance(files, dict) and data == _text(files).encode()
    except UserError as error:
        return f"{MANIFEST} cannot be read ({error.problem})"
    if not isinstance(files, dict) or not as_written or not set(needed) <= set(files):
        return f"{MANIFEST} is not valid"
    for name, digest in files.items():
        if Path(name).name != name or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            return f"{MANIFEST} is not valid"
        try:
            if not storage.is_file(directory / name):
                return f"{name} is missing"
            if storage.digest(directory / name) != digest:
                return f"{name} has changed (its SHA-256 differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None
