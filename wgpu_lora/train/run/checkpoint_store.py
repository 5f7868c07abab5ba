"""Where a run keeps its files: an interface, and plain directories.

Files are named by the paths that they have in plain directories, which messages show too. A storage may keep them in
another form, such as a sealed archive for each directory.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from wgpu_lora.files.atomic import file_digest, new_directory, write_bytes_atomic
from wgpu_lora.files.json_files import MAX_JSON_BYTES, read_bytes
from wgpu_lora.files.locks import is_directory, restore
from wgpu_lora.formats.tokenizer.tokenizer_files import write_tokenizer

EVIDENCE = "evidence.jsonl"  # the log that a protected run has in its directory


class CheckpointStore(Protocol):
    """Reads and writes a run's files. All methods raise OSError if the system refuses."""

    def has(self, directory: Path) -> bool:
        """Whether there is a complete directory, such as a checkpoint."""

    def directories(self, root: Path) -> list[Path]:
        """The complete directories in a directory, in any order; none if it does not exist."""

    def is_file(self, path: Path) -> bool:
        """Whether there is a file."""

    def read(self, path: Path, max_bytes: int | None = MAX_JSON_BYTES) -> bytes:
        """The content of a file, at most one byte more than `max_bytes`.

        Raises:
            UserError: the file is missing or cannot be read.
        """

    def digest(self, path: Path) -> str:
        """A file's SHA-256, in hexadecimal."""

    def file_contents(self, directory: Path) -> Mapping[str, bytes] | None:
        """The files of a directory by name; None if they are plain files, which are read from there."""

    def write_directory(self, final: Path, files: Mapping[str, bytes]) -> None:
        """Create or replace a directory atomically: a crash leaves the old one or the new one."""

    def remove(self, directory: Path) -> None:
        """Remove a directory; a crash does not leave a part of it under its name."""

    def write(self, path: Path, data: bytes | None) -> None:
        """Write a file of the result atomically; None removes it."""

    def write_tokenizer(self, directory: Path, files: Mapping[str, bytes]) -> bool:
        """Write the files of the base's tokenizer and chat template to a directory, if that exists and has no others.

        Returns whether it has them.
        """

    def finish(self, directory: Path) -> None:
        """Called when all files of the result are written."""

    def disk_path(self, path: Path) -> Path:
        """The path, on the disk, of what keeps a file or a directory."""


class PlainFiles(CheckpointStore):
    """Plain files."""

    def has(self, directory: Path) -> bool:
        return is_directory(directory)

    def directories(self, root: Path) -> list[Path]:
        if not root.is_dir():
            return []
        for path in [*root.glob(".*.previous")]:
            restore(path.with_name(path.name[1:].removesuffix(".previous")))
        return [path for path in root.iterdir() if path.is_dir()]

    def is_file(self, path: Path) -> bool:
        return path.is_file()

    def read(self, path: Path, max_bytes: int | None = MAX_JSON_BYTES) -> bytes:
        return read_bytes(path, max_bytes)

    def digest(self, path: Path) -> str:
        return file_digest(path)

    def file_contents(self, directory: Path) -> Mapping[str, bytes] | None:
        return None

    def write_directory(self, final: Path, files: Mapping[str, bytes]) -> None:
        with new_directory(final) as directory:
            for name, data in files.items():
                (directory / name).write_bytes(data)

    def remove(self, directory: Path) -> None:
        hidden = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(hidden, ignore_errors=True)
        directory.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def write(self, path: Path, data: bytes | None) -> None:
        if data is None:
            path.unlink(missing_ok=True)
        else:
            write_bytes_atomic(path, data)

    def write_tokenizer(self, directory: Path, files: Mapping[str, bytes]) -> bool:
        return write_tokenizer(directory, files)

    def finish(self, directory: Path) -> None:
        """Nothing."""

    def disk_path(self, path: Path) -> Path:
        return path


PLAIN_FILES = PlainFiles()
