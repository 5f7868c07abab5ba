"""Data that only the driver's machine has: what is sent of them, and what a node accepts."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from wgpu_lora.atomic import file_digest
from wgpu_lora.cluster.facts import Task
from wgpu_lora.cluster.spec.paths import SENDABLE, SENT
from wgpu_lora.errors import UserError
from wgpu_lora.paths import is_path

MOST_BYTES, MOST_FILES = 4 << 30, 1000  # of a parcel that a driver sends
LARGEST_BYTES, LARGEST_FILES = 256 << 30, 20_000  # of one that a host takes: teacher caches may be large
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ParcelFile:
    """A file of a parcel. path: in its folder, with `/`; digest: its SHA-256; size: in bytes."""

    path: str
    digest: str
    size: int


@dataclass(frozen=True)
class Parcel:
    """A file or a folder of data, sent by its content.

    Attributes:
        digest: of its list of files; names its folder on the nodes. name: of the file or folder in that.
    """

    digest: str
    name: str
    files: list[ParcelFile]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def value(self) -> str:
        """What an option says instead of the path."""
        return f"{SENT}{self.digest}/{self.name}"


def parcel(path: str, most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES) -> Parcel:
    """The parcel of a file or a folder.

    Raises:
        UserError: it cannot be read, is empty or too large, or has links to folders.
    """
    root = Path(path)
    found = []
    try:
        for file in [root] if root.is_file() else _files_in(root, 100 * most_files):
            inside = str(file.relative_to(root.parent)).replace(os.sep, "/")
            found.append((inside, file, file.stat().st_size))
        if not found:
            raise UserError(f"{path} has no files to send: name a file of rows, or a folder with a train.jsonl.")
        size = sum(one[2] for one in found)
        if size > most_bytes or len(found) > most_files:
            raise UserError(
                f"{path} has {size:,} bytes in {len(found):,} files, too much to send (at most {most_bytes >> 30} GiB "
                f"in {most_files:,}): copy it to a folder that all machines have."
            )
        files = [ParcelFile(inside, file_digest(file), size) for inside, file, size in found]
    except OSError as error:
        raise UserError(f"{path} cannot be sent, since it cannot be read ({error.strerror or error}).") from None
    made = Parcel(_digest_of(files), root.name, files)
    check_parcel(made)
    return made


def _files_in(root: Path, most: int) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        found += [Path(folder, name) for name in names]
        linked = [Path(folder, name) for name in folders if Path(folder, name).is_symlink()]
        if wrong := [*linked, *(path for path in map(Path(folder).joinpath, names) if not path.is_file())]:
            what = "a link to a folder" if linked else "no file that can be read"
            raise UserError(f"{wrong[0]} is {what}, which is not sent: put the files themselves there, or remove it.")
        if len(found) > most:
            break
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def _digest_of(files: Sequence[ParcelFile]) -> str:
    return hashlib.sha256(json.dumps([asdict(file) for file in files]).encode()).hexdigest()


def check_parcel(said: Parcel) -> None:
    """Whether a parcel is one that may be written below a folder of its own; called by both ends.

    Raises:
        UserError: a name leads elsewhere, or a digest or a size cannot be right.
    """
    paths = [file.path for file in said.files]
    good = (
        len(paths) <= LARGEST_FILES
        and len({path.casefold() for path in paths}) == len(paths)
        and all(_inside(path, said.name) for path in paths)
        and all(_DIGEST.fullmatch(file.digest) and file.size >= 0 for file in said.files)
        and said.bytes <= LARGEST_BYTES
        and said.digest == _digest_of(said.files)
    )
    if not good or not paths:
        raise UserError(
            f"The data {said.name!a:.80} cannot be sent: file names must be plain UTF-8 text that differs by more than "
            "its case."
        )


def _inside(path: str, name: str) -> bool:
    parts = path.split("/")
    plain = is_path(path) and path.isprintable() and "\\" not in path
    return plain and parts[0] == name and not {"", ".", ".."} & set(parts)


def sendable(tasks: Sequence[Task], lacking: Collection[str]) -> list[str]:
    """The paths among `lacking`, which a node does not have, that are data of these tasks and exist here."""
    named = {str(task.options[key]) for task in tasks for key in SENDABLE if task.options.get(key)}
    return sorted(path for path in named & set(lacking) if Path(path).exists())


def with_sent(tasks: Sequence[Task], parcels: Mapping[str, Parcel]) -> list[Task]:
    """The tasks, with what has been sent instead of the paths of data."""
    return [
        replace(
            task,
            options={
                key: parcels[value].value if key in SENDABLE and str(value) in parcels else value
                for key, value in task.options.items()
            },
        )
        for task in tasks
    ]
