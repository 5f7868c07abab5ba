"""Checkpoints by content: the files of a unit by their SHA-256, in a folder, a bucket, or another host's folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import Any, Protocol

import fsspec

from wgpu_lora.cluster.cluster_paths import unit_parts
from wgpu_lora.cluster.messages import StoredFile
from wgpu_lora.errors import StorageError, reason
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.files.paths import is_path

PIECE = 8 << 20  # bytes of a call between hosts
PART = ".part"


class DamagedCheckpoint(Exception):
    """Files of a checkpoint are missing, or have other digests."""


class Store(Protocol):
    """Files of units, by digest."""

    def write(self, unit: str, digest: str, source: Path) -> None:
        """Add a file. Raises StorageError if there is no room, or the store cannot be reached."""

    def read(self, unit: str, digest: str, target: Path) -> None:
        """Get a file. Raises DamagedCheckpoint if the store does not have it."""

    def listed(self, unit: str) -> set[str]:
        """The digests of the unit's files."""
        ...

    def remove(self, unit: str, digests: Collection[str]) -> None:
        """Remove files of the unit."""

    def forget(self, run: str) -> None:
        """Remove the files of all units of a run."""


class FolderStore:
    """Files in a folder or a bucket, `URL/RUN/TASK/DIGEST`. url: as fsspec has it, or a path."""

    def __init__(self, url: str | Path):
        try:
            self._files, self._root = fsspec.core.url_to_fs(str(url))
        except Exception as error:  # an unknown protocol, or its library is missing
            raise StorageError(f"The storage {url} cannot be used ({_reason(error)}): check it.") from None
        self._local = "file" in self._files.protocol

    def _file_path(self, unit: str, name: str = "") -> str:
        return "/".join([self._root.rstrip("/"), *unit_parts(unit), *([name] if name else [])])

    def path(self, unit: str, digest: str) -> str:
        return self._file_path(unit, digest)

    def open(self, unit: str, digest: str) -> Any:
        """A file to read. Raises DamagedCheckpoint if it is not there."""
        try:
            return self._files.open(self._file_path(unit, digest), "rb")
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{digest[:12]} of {unit} is missing in {self._root}") from None

    def listed(self, unit: str) -> set[str]:
        try:
            names = self._files.ls(self._file_path(unit), detail=False, refresh=True)
        except FileNotFoundError:
            return set()
        return {name.rpartition("/")[2] for name in names}

    def check(self, name: str, write: bool) -> bool:
        """Whether a small file of this name is in the store; write: put it there.

        Raises:
            StorageError: it cannot be written.
        """
        digest = hashlib.sha256(name.encode()).hexdigest()
        with tempfile.TemporaryDirectory(prefix="wgpu-lora-") as temporary:
            file = Path(temporary, "file")
            file.write_text(name)
            if write:
                self.write(f"check/{name}", digest, file)
            try:
                self.read(f"check/{name}", digest, file)
                return True
            except (DamagedCheckpoint, ConnectionError):
                return False

    def write(self, unit: str, digest: str, source: Path) -> None:
        target = self._file_path(unit, digest)
        try:
            self._files.makedirs(self._file_path(unit), exist_ok=True)
            if self._local:  # buckets show an object when it is complete
                shutil.copyfile(source, f"{target}{PART}")
                os.replace(f"{target}{PART}", target)
            else:
                self._files.put_file(str(source), target)
        except Exception as error:  # libraries of buckets have errors of their own
            text = (
                f"A checkpoint cannot be written to {self._root} ({_reason(error)}): make room, or check the storage."
            )
            raise StorageError(text) from None

    def read(self, unit: str, digest: str, target: Path) -> None:
        try:
            self._files.get_file(self._file_path(unit, digest), str(target))
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{digest[:12]} of {unit} is missing in {self._root}") from None
        except Exception as error:
            raise ConnectionError(f"{self._root} cannot be read ({_reason(error)})") from None

    def remove(self, unit: str, digests: Collection[str]) -> None:
        for digest in digests:
            with suppress(FileNotFoundError):
                self._files.rm_file(self._file_path(unit, digest))

    def forget(self, run: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm("/".join([self._root.rstrip("/"), unit_parts(f"{run}/-")[0]]), recursive=True)

    def append(self, unit: str, digest: str, offset: int, data: bytes, size: int) -> None:
        """Add a piece of a file of `size` bytes, which is there once it is whole and has its digest.

        Raises:
            StorageError: there is no room. DamagedCheckpoint: the pieces are not those of the file.
        """
        part = Path(self._file_path(unit, f"{digest}{PART}"))
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            with part.open("r+b" if offset else "wb") as file:
                file.seek(offset)
                file.write(data)
                file.truncate()
        except OSError as error:
            raise StorageError(
                f"A checkpoint cannot be written to {part.parent} ({reason(error)}): make room."
            ) from None
        if offset + len(data) == size:
            if file_digest(part) != digest:
                part.unlink()
                raise DamagedCheckpoint(f"{digest[:12]} of {unit} came with another digest")
            os.replace(part, self._file_path(unit, digest))

    def piece(self, unit: str, digest: str, offset: int, size: int = PIECE) -> bytes:
        """Bytes of a file. Raises DamagedCheckpoint if it is not there."""
        with self.open(unit, digest) as file:
            file.seek(offset)
            data: bytes = file.read(size)
            return data


def shared_store(storage: str) -> FolderStore:
    """The checkpoints in a storage that all hosts reach."""
    return FolderStore(f"{storage.rstrip('/')}/checkpoints")


class HostStore:
    """The folder of another host, through its actor.

    Args:
        call: calls a method of the actor, and raises what it raises, or ConnectionError.
    """

    def __init__(self, call: Any):
        self._call = call

    def listed(self, unit: str) -> set[str]:
        return set(self._call("listed", unit))

    def write(self, unit: str, digest: str, source: Path) -> None:
        size, offset = source.stat().st_size, 0
        with source.open("rb") as file:
            while True:
                data = file.read(PIECE)
                self._call("append", unit, digest, offset, data, size)
                offset += len(data)
                if offset >= size:
                    return

    def read(self, unit: str, digest: str, target: Path) -> None:
        with target.open("wb") as file:
            while data := self._call("piece", unit, digest, file.tell()):
                file.write(data)

    def remove(self, unit: str, digests: Collection[str]) -> None:
        self._call("remove", unit, sorted(digests))

    def forget(self, run: str) -> None:
        self._call("forget", run)


def store_files(
    stores: Sequence[Store], unit: str, directory: Path, files: Sequence[StoredFile]
) -> tuple[list[int], dict[int, set[str]]]:
    """Write the files of a directory to stores.

    Returns:
        The numbers of the stores that have all of them, and the digests that each had before.

    Raises:
        StorageError, ConnectionError: none of them does.
    """
    before, errors = dict[int, set[str]](), list[Exception]()
    sources = {file.digest: directory / file.path for file in files}
    for number, store in enumerate(stores):
        try:
            digests = store.listed(unit)
            for digest in sorted(sources.keys() - digests):
                store.write(unit, digest, sources[digest])
            before[number] = digests
        except (StorageError, ConnectionError, DamagedCheckpoint) as error:
            errors.append(error)
    if not before:
        raise errors[0]
    return list(before), before


def restore_files(stores: Iterable[Store], unit: str, files: Sequence[StoredFile], directory: Path) -> None:
    """Make a directory of files, each from the first store that has it; it is complete, or not there.

    Raises:
        DamagedCheckpoint: no store has a file with its digest, or a path leads out of the directory.
        ConnectionError: no store has it, and one that may have it does not answer.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    whole = Path(tempfile.mkdtemp(prefix=f".{directory.name[:40]}.", suffix=".tmp", dir=directory.parent))
    try:
        _read_files(list(stores), unit, files, whole)
        shutil.rmtree(directory, ignore_errors=True)
        whole.chmod(0o777 & ~_umask())
        whole.rename(directory)
    finally:
        shutil.rmtree(whole, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _read_files(stores: Sequence[Store], unit: str, files: Sequence[StoredFile], directory: Path) -> None:
    for file in files:
        if not is_plain_path(file.path):
            raise DamagedCheckpoint(f"The checkpoint of {unit} has a file {file.path!a:.80}, which leads elsewhere.")
        target = directory / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        why, away = "no host has it", None
        for store in stores:
            try:
                store.read(unit, file.digest, target)
            except DamagedCheckpoint as error:
                why = str(error)
                continue
            except ConnectionError as error:
                away = error
                continue
            if _digest(target) == file.digest:
                break
            why = "it has another digest"
        else:
            if away:  # it may be back soon
                raise away
            raise DamagedCheckpoint(f"The checkpoint of {unit} is incomplete: {file.path} cannot be read ({why}).")


def is_plain_path(path: str) -> bool:
    """Whether a relative path stays below its folder, on any system."""
    plain = is_path(path) and path.isprintable() and "\\" not in path and not PureWindowsPath(path).drive
    return plain and not {"", ".", ".."} & set(path.split("/"))


def _reason(error: Exception) -> str:
    return reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.stat().st_size < PIECE else file_digest(path)
