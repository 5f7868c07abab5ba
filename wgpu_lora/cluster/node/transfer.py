"""Copies between machines, file by file and in pieces: into a shelf, and out of one."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from wgpu_lora.atomic import file_digest, replace_directory, sync_directory
from wgpu_lora.cluster.facts import Copy
from wgpu_lora.cluster.node.listing import FileFacts, Listing, checked_path, listing_digest, total_bytes
from wgpu_lora.cluster.node.shelf import PIECE, Shelf, link_or_copy
from wgpu_lora.errors import UserError, reason

Read = Callable[[FileFacts, int], bytes]  # a piece of a file, from an offset
Find = Callable[[FileFacts], Path | None]  # where a file is on this host, if it is


class Unreachable(Exception):
    """Another machine does not answer."""


class Damaged(UserError):
    """What is copied is not what its list says."""


class ShelfPort(Protocol):
    """A shelf, of this host (`Shelf`) or of another one, whose methods raise `Unreachable`, too."""

    def begin(self, unit: str, epoch: int, files: Listing) -> dict[str, int]: ...

    def put(self, unit: str, epoch: int, file: FileFacts, offset: int, data: bytes) -> None: ...

    def commit(self, copy: Copy, files: Listing) -> Copy: ...

    def files(self, unit: str, digest: str) -> list[FileFacts]: ...

    def read(self, unit: str, digest: str, path: str, offset: int, size: int = PIECE) -> bytes: ...


def send(shelf: ShelfPort, copy: Copy, files: Listing, root: Path, going: Callable[[], bool]) -> Copy | None:
    """Put the files below `root` into a shelf, where it lacks them, and commit the copy.

    Args:
        going: asked before each piece and before the commit; once it is False, nothing more is sent, and the result is
            None.

    Raises:
        Fenced, UserError, Unreachable or OSError: the shelf has its earlier copy.
    """
    missing = shelf.begin(copy.unit, copy.epoch, files)
    by_digest = {file.digest: file for file in files}
    for digest, have in missing.items():
        file = by_digest[digest]
        if isinstance(shelf, Shelf):
            if not going():
                return None
            shelf.take(copy.unit, copy.epoch, file, root / file.path)
            continue
        with (root / file.path).open("rb") as source:
            source.seek(have)
            while True:
                if not going():
                    return None
                data = source.read(PIECE)
                shelf.put(copy.unit, copy.epoch, file, have, data)
                have += len(data)
                if have >= file.size or not data:
                    break
    return shelf.commit(copy, files) if going() else None


def copy_of(unit: str, epoch: int, files: Listing, steps: dict[str, int], *, final: bool, host: str) -> Copy:
    """The facts of a copy of these files."""
    return Copy(unit, epoch, listing_digest(files), steps, total_bytes(files), final, host)


def fetch(
    files: Listing,
    target: Path,
    read: Read,
    *,
    find: Find = lambda file: None,
    link: bool = False,
    going: Callable[[], bool] = lambda: True,
) -> None:
    """Make a new directory of these files, whose digests are checked; nothing is left of it if that fails.

    The files are written to a hidden directory beside, which is then renamed.

    Args:
        read: returns at most PIECE bytes of a file from an offset. find: where a file is on this host.
        link: whether weights are linked from there, since nothing will write to them in place.
        going: asked before each piece; the work is given up once it is False.

    Raises:
        UserError: a file is not what the list says, the directory exists, or the disk refuses.
        Whatever `read` raises.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    hidden = target.with_name(f".{target.name}.tmp")
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir()
        for file in files:
            path = hidden / checked_path(file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            source = find(file)
            if source is None:
                _receive(file, path, read, going)
            elif link and path.suffix == ".safetensors":
                link_or_copy(source, path)
            else:
                shutil.copyfile(source, path)
            if source is not None and file_digest(path) != file.digest:
                raise Damaged(f"{source} has changed (its SHA-256 differs from its list): restore it.")
        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        if target.exists() or target.is_symlink():
            raise UserError(f"{target} exists already, with other files: move it away.")
        replace_directory(hidden, target)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({reason(error)}): make room, or choose another.") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    sync_directory(target.parent)


def restore(shelf: ShelfPort, unit: str, digest: str, target: Path, going: Callable[[], bool]) -> None:
    """Make a unit's directory from its copy in a shelf.

    Raises:
        Damaged: the shelf has no such copy, or its files are not what their list says.
        UserError: the directory cannot be written. Unreachable: the shelf's host does not answer.
    """

    def find(file: FileFacts) -> Path | None:
        if not isinstance(shelf, Shelf):
            return None
        path = shelf.path(unit, digest, file.path)
        if not path.is_file():
            raise Damaged(f"{path} is missing: its disk has lost it.")
        return path

    def read(file: FileFacts, offset: int) -> bytes:
        try:
            return shelf.read(unit, digest, file.path, offset)
        except UserError as error:
            raise Damaged(str(error)) from None

    try:
        files = shelf.files(unit, digest)
    except UserError as error:
        raise Damaged(str(error)) from None
    fetch(files, target, read, find=find, link=True, going=going)


def _receive(file: FileFacts, path: Path, read: Read, going: Callable[[], bool]) -> None:
    digest, have = hashlib.sha256(), 0
    with path.open("wb") as out:
        while have < file.size:
            if not going():
                raise UserError(f"{file.path} is not copied any more: the job has ended.")
            data = read(file, have)
            if not data or have + len(data) > file.size:
                raise Damaged(f"{file.path} has another size than its list says: copy it again.")
            out.write(data)
            digest.update(data)
            have += len(data)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != file.digest:
        raise Damaged(f"{file.path} has changed on its way (its SHA-256 differs): copy it again.")


def same_files(directory: Path, files: Listing) -> bool:
    """Whether a directory consists of exactly these files."""
    try:
        paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if not path.is_dir()}
        return paths.keys() == {file.path for file in files} and all(
            not paths[file.path].is_symlink() and file_digest(paths[file.path]) == file.digest for file in files
        )
    except OSError:
        return False
