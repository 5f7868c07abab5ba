"""Writing so that a crash or a full disk never damages what was there before."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from wgpu_lora.errors import UserError

# `.NAME.tmp` and `.NAME.previous` of directories, `.NAME.old` of removed ones; tempfile adds eight letters of its own.
_LEFTOVER = re.compile(r"\.(.+?)(\.[a-z0-9_]{8})?\.(tmp|previous|old)")


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


UMASK = _read_umask()  # once: it is set in reading it, and another thread may be writing a file


def write_bytes_atomic(path: str | Path, data: bytes) -> None:
    """Puts `data` at `path`: afterwards the file is whole, and before that it is what it was.

    The data go to a file beside `path`, are flushed to the disk, and are renamed over it. Raises OSError.
    """
    path = Path(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~UMASK)  # mkstemp's own mode would hide the file from everyone else
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def write_new_bytes(path: str | Path, data: bytes, option: str, replacing: bytes | None = None) -> None:
    """As `write_bytes_atomic`, to a path where nothing is, not even from a moment ago.

    Args:
        option: what named the path, for the message.
        replacing: what may lie there: these bytes.

    Raises:
        UserError: something else is there, or the directory is missing or cannot be written.
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
            try:
                os.link(temporary / path.name, path)  # which refuses where something is
            except FileExistsError:
                raise taken from None
            except OSError:  # a file system without links
                (temporary / path.name).rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _sync_directory(path.parent)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): give {option} another place.") from None


def replace_directory(tmp: str | Path, final: str | Path) -> None:
    """Moves the finished directory `tmp` to `final`, which it replaces; both must be on one file system.

    Everything in `tmp` is flushed to the disk first. A directory cannot be renamed over one that holds files, so an
    existing `final` steps aside to `.<name>.previous` for a moment; a crash in that moment leaves both beside each
    other, whole. Raises OSError.
    """
    tmp, final = Path(tmp), Path(final)
    for path in sorted(tmp.rglob("*")):
        if path.is_dir():
            _sync_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_directory(tmp)
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
    _sync_directory(final.parent)
    _remove(previous)


def sweep(directory: str | Path, name: re.Pattern[str]) -> None:
    """Removes what a killed process left of writing, in this module's ways, what the whole of `name` matches.

    What had stepped aside for a directory that never came is put back. Nobody else may be writing there.
    """
    directory = Path(directory)
    for path in list(directory.iterdir()) if directory.is_dir() else []:
        match = _LEFTOVER.fullmatch(path.name)
        inner = match
        while inner and not name.fullmatch(inner[1]):
            inner = _LEFTOVER.fullmatch(inner[1])  # a file of a hidden directory that was written in turn
        if not match or not inner:
            continue
        final = directory / match[1]
        if path.is_dir() and match[3] == "previous" and not final.exists():
            path.rename(final)
        elif path.is_dir() or (match[2] and match[3] == "tmp"):  # files come from tempfile alone
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()  # the link, never what it leads to
    elif path.exists():
        shutil.rmtree(path)


def file_digest(path: Path) -> str:
    """A file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_directory(directory: Path) -> None:
    """Flushes the names in a directory; a no-op on Windows, which cannot open one."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
