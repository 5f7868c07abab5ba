"""Atomic writes: a crash or a full disk never damages existing files."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from wgpu_lora.errors import UserError

# Directories use `.NAME.tmp` and `.NAME.previous`, removed ones `.NAME.old`; tempfile adds eight characters.
_LEFTOVER = re.compile(r"\.(.+?)(\.[a-z0-9_]{8})?\.(tmp|previous|old)")


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


UMASK = _read_umask()  # read once, since reading it briefly changes it for all threads


def write_bytes_atomic(path: str | Path, data: bytes) -> None:
    """Replace the contents of `path` atomically.

    The data are written to a file beside `path`, flushed to disk, and renamed over it. Raises OSError.
    """
    path = Path(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~UMASK)  # mkstemp makes files private
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_new_bytes(path: str | Path, data: bytes, option: str, replacing: bytes | None = None) -> None:
    """Like `write_bytes_atomic`, but refuse to overwrite an existing path, without a race.

    Args:
        option: name of the option that gave the path, for messages.
        replacing: an existing file with exactly these bytes may be overwritten.

    Raises:
        UserError: the path exists, or the directory is missing or cannot be written.
    """
    path = Path(path)
    taken = UserError(f"{path} exists already: give {option} another name, or remove it.")
    try:
        if replacing is not None and path.is_file() and path.read_bytes() == replacing:
            write_bytes_atomic(path, data)
            return
        if path.is_symlink() or path.exists():
            raise taken
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
        try:
            write_bytes_atomic(temporary / path.name, data)
            name_new(temporary / path.name, path)
        except FileExistsError:
            raise taken from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync_directory(path.parent)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): choose another {option}.") from None


def name_new(temporary: Path, path: Path) -> None:
    """Give a finished file its name, without a race. Raises FileExistsError if the path exists; OSError."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if path.exists():
            raise FileExistsError(path) from None
        temporary.rename(path)


def replace_directory(tmp: str | Path, final: str | Path) -> None:
    """Replace the directory `final` with the finished directory `tmp` on the same file system.

    Everything in `tmp` is flushed to disk first. A directory cannot be renamed over a non-empty one, so an existing
    `final` is first renamed to `.<name>.previous`; a crash in between leaves both intact. Raises OSError.
    """
    tmp, final = Path(tmp), Path(final)
    for path in sorted(tmp.rglob("*")):
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(tmp)
    previous = final.with_name(f".{final.name}.previous")
    if final.exists():
        _remove(previous)
        final.rename(previous)
    try:
        tmp.rename(final)
    except BaseException:
        if previous.exists():
            previous.rename(final)
        raise
    sync_directory(final.parent)
    _remove(previous)


def sweep(directory: str | Path, name: re.Pattern[str]) -> None:
    """Remove temporary files that a killed process left in a directory, for files whose whole name matches `name`.

    A directory that was renamed to make room for a missing one is restored. No other process may be writing there.
    """
    directory = Path(directory)
    for path in list(directory.iterdir()) if directory.is_dir() else []:
        match = _LEFTOVER.fullmatch(path.name)
        inner = match
        while inner and not name.fullmatch(inner[1]):
            inner = _LEFTOVER.fullmatch(inner[1])  # a temporary file for a temporary directory
        if not match or not inner:
            continue
        final = directory / match[1]
        if path.is_dir() and match[3] == "previous" and not final.exists():
            path.rename(final)
        elif path.is_dir() or (match[2] and match[3] == "tmp"):  # only tempfile makes files
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()  # the link, never its target
    elif path.exists():
        shutil.rmtree(path)


def file_digest(path: Path) -> str:
    """A file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk; no-op on Windows, which cannot open directories."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
