"""Lists of files with their digests: what a copy consists of."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from wgpu_lora.cluster.facts import from_plain, to_plain
from wgpu_lora.cluster.node.layout import ADAPTERS, checked_digest, checked_part
from wgpu_lora.errors import UserError
from wgpu_lora.json_files import to_json
from wgpu_lora.paths import is_path
from wgpu_lora.train.run.pipeline_state import MEMBER

MAX_FILES = 20_000
FOREIGN = "\\:" if os.name == "nt" else "\\"  # what separates parts of paths on Windows
MAX_BYTES = 1 << 40  # of one file


@dataclass(frozen=True)
class FileFacts:
    """A file of a copy. path: relative, with slashes. digest: SHA-256. size: bytes."""

    path: str
    digest: str
    size: int


Listing = Sequence[FileFacts]


def plain_listing(files: Listing) -> list[dict[str, Any]]:
    """A listing as JSON values."""
    return [to_plain(file) for file in files]


def checked_listing(value: Any) -> list[FileFacts]:
    """A listing from JSON values of another machine.

    Raises:
        UserError: a path is unsafe or occurs twice, or a digest, a size or their number is not allowed.
    """
    if not isinstance(value, list) or len(value) > MAX_FILES:
        raise UserError(f"A list of files must be a list of at most {MAX_FILES:,} files: copy fewer.")
    try:
        files = [from_plain(FileFacts, item) for item in value]
    except ValueError as error:
        raise UserError(f"A list of files is not valid ({error}): use the same version on all machines.") from None
    seen: set[str] = set()
    for file in files:
        checked_path(file.path)
        checked_digest(file.digest)
        if not 0 <= file.size <= MAX_BYTES:
            raise UserError(f"{file.path} cannot have {file.size:,} bytes: copy it again.")
        if file.path in seen:
            raise UserError(f"A list of files names {file.path} twice: copy it again.")
        seen.add(file.path)
    parents = {"/".join(file.path.split("/")[:n]) for file in files for n in range(1, file.path.count("/") + 1)}
    if clash := parents & seen:
        raise UserError(f"A list of files names {min(clash)} as a file and as a directory: copy it again.")
    return files


def checked_path(path: str) -> str:
    """A relative path that stays below its directory, on all systems. Raises UserError."""
    parts = path.split("/")
    unsafe = any(part in ("", ".", "..") or any(c in part for c in FOREIGN) for part in parts)
    if unsafe or not is_path(path) or not path.isprintable():
        raise UserError(f"{path!a:.120} cannot be the path of a copied file: it must stay below its directory.")
    return path


def listing_digest(files: Listing) -> str:
    """The SHA-256 of a listing, whatever its order."""
    text = to_json(sorted([file.path, file.digest, file.size] for file in files))
    return hashlib.sha256(text.encode()).hexdigest()


def total_bytes(files: Iterable[FileFacts]) -> int:
    """The bytes of all files, equal ones once."""
    return sum({file.digest: file.size for file in files}.values())


def results_of(files: Listing, task: str) -> list[FileFacts]:
    """The files of a task's result, by their paths in its directory.

    The link to the record of a pipeline is left out: the record is not copied with one adapter, which is a run that can
    be extended by itself.
    """
    start = f"{ADAPTERS}/{checked_part(task)}/"
    inside = [FileFacts(f.path.removeprefix(start), f.digest, f.size) for f in files if f.path.startswith(start)]
    return [file for file in inside if file.path != MEMBER]
