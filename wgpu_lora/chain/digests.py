"""Digests of what a stage depends on, and of its outputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from wgpu_lora.assets import ROOT, asset_dir
from wgpu_lora.atomic import file_digest, write_bytes_atomic

CODE = (".py", ".wgsl", ".j2")
MISSING = "missing"


@cache
def code_digest() -> str:
    """SHA-256 of the package's code and kernels."""
    digest = hashlib.sha256()
    for folder in (ROOT / "wgpu_lora", Path(str(asset_dir("shaders")))):
        for path in sorted(folder.rglob("*")):
            if path.suffix in CODE:
                digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def digest_of(value: Any) -> str:
    """SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


class Digests:
    """SHA-256 of files, kept in a file, so that a large one is read again only if its size, times or number changed."""

    def __init__(self, path: Path):
        self._path = path
        self._known: dict[str, list[Any]] = {}
        with suppress(OSError, ValueError):
            known = json.loads(path.read_bytes())
            self._known = known if isinstance(known, dict) else {}

    def of(self, path: Path) -> str:
        """The digest of a file; "missing" if there is none."""
        try:
            state = path.stat()
            mark = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]  # a time may be set back
            key = str(path.absolute())
            held = self._known.get(key)
            if not isinstance(held, list) or held[:-1] != mark:
                held = self._known[key] = [*mark, file_digest(path)]
            return str(held[-1])
        except OSError:
            return MISSING

    def of_all(self, paths: Iterable[Path]) -> dict[str, str]:
        """Digests of files, and of the files in directories, by path."""
        return {str(file): self.of(file) for path in paths for file in _within(path)}

    def save(self) -> None:
        write_bytes_atomic(self._path, (json.dumps(self._known) + "\n").encode())


def _within(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (file for file in sorted(path.iterdir()) if file.is_file() and not file.name.startswith("."))
    else:
        yield path
