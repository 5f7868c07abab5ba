"""What may be a path or a name, and links that lead nowhere, or elsewhere."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO

from wgpu_lora.errors import UserError

MAX_PATH = 2048  # bytes; systems allow 1,024 to 4,096 for a whole path


_folders: list[str] = []


def working_folder() -> Path:
    """The current folder or, if it has been removed, the one that was current when this was last called.

    Raises:
        UserError: it had been removed at the start.
    """
    with suppress(FileNotFoundError):
        _folders[:] = [os.getcwd()]
    if not _folders:
        raise UserError("The current folder does not exist any more: change to another.")
    return Path(_folders[0])


def open_file(path: str | Path) -> IO[bytes]:
    """Open a regular file for reading. Raises OSError, also for a pipe, a socket or a device, which might never end."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)  # Windows has pipes elsewhere
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def is_name(text: str) -> bool:
    """Whether a text is a usable path: valid UTF-8 without NUL."""
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:  # file names may be any bytes
        return False


def is_path(text: str) -> bool:
    """Whether file systems can have a text as a path: a usable name, of which neither the whole nor a part is too long.

    Paths in files are untrusted: pathlib raises OSError if it is asked about one that is too long.
    """
    return is_name(text) and len(text.encode()) <= MAX_PATH and all(len(p.encode()) <= 255 for p in text.split("/"))


def check_path(path: str | Path) -> None:
    """Raise UserError unless `is_path`."""
    if not is_path(str(path)):
        raise UserError(f"{str(path)!a:.80} cannot be a path: it must be UTF-8 text without NUL, and not too long.")


def check_name(path: Path) -> None:
    """Raise UserError unless a path is valid UTF-8, since model cards, records and indices contain it."""
    if not is_name(str(path)):
        raise UserError(f"{str(path)!a:.200} is not a valid UTF-8 name: rename that file or directory.")


def check_links(path: Path) -> None:
    """Raise UserError if a path is, or leads through, a link to nothing or a loop of links."""
    for part in (path, *path.parents):
        if part.is_symlink() and not part.exists():
            raise UserError(f"{part} is a link that leads nowhere: give another path, or remove the link.")


def links_outside(path: Path, directory: Path) -> bool:
    """Whether a path resolves to a file outside of the directory that contains it.

    Links from a snapshot of the Hugging Face cache into its `blobs` are allowed.
    """
    root, target = directory.resolve(), path.resolve()
    cached = root.parent.name == "snapshots" and target.is_relative_to(root.parent.parent / "blobs")
    return not (target.is_relative_to(root) or cached)
