"""Locks of outputs against other processes, and what those that died have left."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from wgpu_lora.errors import UserError, reason
from wgpu_lora.files.paths import check_links, check_path

if TYPE_CHECKING:
    from filelock import AcquireReturnProxy, FileLock

# Directories use `.NAME.tmp` and `.NAME.previous`, removed ones `.NAME.old`; tempfile adds eight characters.
_LEFTOVER = re.compile(r"\.(.+?)(\.[a-z0-9_]{8})?\.(tmp|previous|old)")
FULL = (errno.ENOSPC, errno.EFBIG, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC))


class OutputInUse(UserError):
    """Another process is writing to an output."""


@contextmanager
def locked(path: str | Path, option: str) -> Iterator[None]:
    """Keep other processes from writing to `path`, whether it exists or not, and remove what dead ones have left of it.

    Missing parents are made; if the block fails, they are removed again.

    Raises:
        OutputInUse: another process is writing to it. UserError: the disk refuses.
    """
    from filelock import Timeout

    target = Path(path).absolute()
    file = target.with_name(f".{target.name}.lock")
    with ExitStack() as stack:
        try:
            check_output(target, option)
            stack.enter_context(_new_directory(target.parent))
            stack.enter_context(lock_file(file))
            stack.callback(unlink_lock, file)
            remove_leftovers(target.parent, re.compile(re.escape(target.name)))
        except Timeout:
            raise OutputInUse(
                f"Another process is writing to {path}: wait for it, or choose another {option}."
            ) from None
        except OSError as error:
            raise unwritable(Path(path), option, error) from None
        yield


def lock_file(path: Path, seconds: float = 0.0) -> AcquireReturnProxy[FileLock]:
    """Take a lock file, which is made if it is missing; `with` releases it, as does `.lock.release()`.

    A file that its holder has removed is not taken.

    Raises:
        Timeout: another process, or thread, holds it, and did not let go in `seconds`.
        OSError: its directory cannot hold files or locks.
    """
    from filelock import FileLock  # 20 ms, which most commands do not need

    if path.exists() and not path.is_file():  # opening a pipe would block
        raise OSError(errno.EINVAL, "it is not a regular file")
    path.touch()  # FileLock would take some directories without files, as in /proc, for locked ones
    return FileLock(path, timeout=seconds).acquire()


def unlink_lock(path: Path) -> None:
    """Remove a lock file while it is held, so that who waits for it does not take one that is gone."""
    with suppress(OSError):  # on Windows, while it is open
        path.unlink()


@contextmanager
def _new_directory(directory: Path) -> Iterator[None]:
    """Makes a directory, and removes what it made if the block fails."""
    missing = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):  # another program has put something there
            for parent in missing:
                parent.rmdir()
        raise


def check_output(path: Path, option: str) -> None:
    """Raise UserError if a path cannot be one, leads through a file, or is or leads through a link to nothing."""
    check_path(path)
    check_links(path)
    for part in path.parents:
        if part.exists() and not part.is_dir():
            raise UserError(f"{part} is not a directory: choose another {option}.")


def unwritable(path: Path, option: str, error: OSError) -> UserError:
    """The error for a path that the system refuses to write."""
    cure = "free space, or choose" if error.errno in FULL else "choose"
    return UserError(f"{path} cannot be written ({reason(error)}): {cure} another {option}.")


def remove_leftovers(directory: str | Path, name: re.Pattern[str]) -> None:
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
        if match[3] == "previous" and not (directory / match[1]).exists():
            restore(directory / match[1])
        elif path.is_dir() or (match[2] and match[3] == "tmp"):  # only tempfile makes files
            remove(path)


def restore(path: Path) -> None:
    """Rename a directory back that a killed replacement has moved away. Readers may call it at any time."""
    previous = path.with_name(f".{path.name}.previous")
    if previous.is_dir() and not path.exists():
        with suppress(OSError):  # another process has just put one there
            previous.rename(path)


def is_directory(path: Path) -> bool:
    """Whether there is a directory to read, after `restore`."""
    if not path.is_dir() and path.name:
        restore(path)
    return path.is_dir()


def remove(path: Path) -> None:
    """Remove a file, a directory or a link, if there is one. Raises OSError."""
    if path.is_symlink() or path.is_file():
        path.unlink()  # the link, never its target
    elif path.exists():
        shutil.rmtree(path)
