"""Output that appears whole or not at all: a crash, a full disk or a second process never damages existing files.

New files and directories are made by `new_file` and `new_directory`; `replace_file` and `replace_directory` replace
what exists. Temporary files are beside their target, with its name in theirs, and go with the next who writes it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from wgpu_lora.errors import UserError
from wgpu_lora.files.locks import FULL, check_output, locked, remove, restore, unwritable
from wgpu_lora.files.paths import working_folder


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2
UMASK = _read_umask()  # read once, since reading it briefly changes it for all threads


# -- new files and directories -----------------------------------------------------------------------------------------


def check_new(path: str | Path, option: str, directory: bool = False) -> None:
    """Raise UserError if there is something at `path`, other than an empty directory for a new one, or cannot be.

    Args:
        option: name of the option that gave the path, for messages.
        directory: whether a directory is to be made, whose missing parents are made too.
    """
    path = Path(path)
    try:
        check_output(path, option)
        if path.is_symlink():
            raise UserError(f"{path} is a link: give {option} the path that it leads to, or another.")
        if directory and _is_empty(path):
            check_not_around(path, option)
        elif path.is_file() or (directory and path.exists()):
            raise _exists_error(path, option)
        elif not directory:
            check_file(path, option)
    except OSError as error:
        raise unwritable(path, option, error) from None


def check_file(path: Path, option: str) -> None:
    """Raise UserError if there cannot be a file at `path`, or there is something else. Arguments as for `check_new`."""
    check_output(path, option)
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file: give {option} the name of one.")
    if not path.absolute().parent.is_dir():
        raise UserError(f"The directory {path.parent} of {option} does not exist: create it first.")


def check_not_around(path: Path, option: str) -> None:
    """Raise UserError if a directory that is to be replaced is or holds the current one."""
    if path.resolve() in (working_folder(), *working_folder().parents):
        raise UserError(f"{path} holds the current directory: give {option} a directory in it.")


def _exists_error(path: Path, option: str) -> UserError:
    return UserError(f"{path} exists already: give {option} another name, or remove it.")


@contextmanager
def new_directory(
    path: str | Path, option: str | None = None, replace: bool = False, private: bool = False
) -> Iterator[Path]:
    """An empty directory beside `path`, which becomes it at the end of the block; a block that fails leaves nothing.

    Args:
        option: name of the option that gave the path, for messages. None: the caller has locked what the directory is
            in, and tells of errors.
        replace: whether a directory may be there, which is then replaced.
        private: whether only this user may read the directory.

    Raises:
        UserError: the path exists, another process writes to it, or the disk is full or refuses; with an option only.
        OSError: an error of the block; without an option, of the disk too, with the path as its filename.
    """
    path = Path(path)
    new = option if not replace else None
    if new:
        check_new(path, new, directory=True)
    with ExitStack() as stack:
        if option:
            stack.enter_context(locked(path, option))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
        temporary = stack.enter_context(_temporary_directory(path, option))
        if new:
            check_new(path, new, directory=True)  # what a killed process had moved away is back
        yield temporary
        if new:
            check_new(path, new, directory=True)  # a program without our locks may have made it
        temporary.chmod(0o700 if private else 0o777 & ~UMASK)  # mkdtemp makes directories private
        replace_directory(temporary, path.absolute())


@contextmanager
def new_file(path: str | Path, option: str, private: bool = False) -> Iterator[Path]:
    """A path beside `path` for a file, which becomes it at the end of the block; a block that fails leaves nothing.

    Until then, only this user can read it; with `private`, later too. Arguments and errors as for `new_directory`.
    """
    path = Path(path)
    check_new(path, option)
    with locked(path, option), _temporary_directory(path, option) as temporary:
        check_new(path, option)
        yield temporary / path.name
        _flush(temporary / path.name)
        (temporary / path.name).chmod(0o600 if private else 0o666 & ~UMASK)
        try:
            os.link(temporary / path.name, path)
        except FileExistsError:
            raise _exists_error(path, option) from None
        except OSError:  # a file system without links
            check_new(path, option)
            (temporary / path.name).rename(path)
        sync_directory(path.absolute().parent)


@contextmanager
def _temporary_directory(path: Path, option: str | None) -> Iterator[Path]:
    """A private directory beside `path`, which goes with what is left in it."""
    temporary: Path | None = None
    try:
        name = path.absolute()
        temporary = Path(tempfile.mkdtemp(prefix=f".{name.name}.", suffix=".tmp", dir=name.parent))
        yield temporary
    except OSError as error:
        if temporary and error.errno not in FULL:
            raise  # of what the block reads
        if option:
            raise unwritable(path, option, error) from error
        error.filename = str(path)  # writing to an open file does not say which
        raise
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def numbered(path: Path) -> Path:
    """`path`, with a number appended if something is there other than an empty directory."""
    names = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in count(1))
    return next(
        candidate
        for candidate in names
        if not candidate.is_symlink() and (not candidate.exists() or _is_empty(candidate))
    )


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


# -- what may exist ----------------------------------------------------------------------------------------------------


def replace_file(path: str | Path, data: bytes, option: str) -> None:
    """Write a file that may exist, under a lock. Missing parents are made, unless `check_file` has refused them.

    Raises:
        UserError: another process is writing it, it is no file, or the disk is full or refuses.
    """
    path = Path(path)
    with locked(path, option):
        check_file(path, option)
        try:
            write_bytes_atomic(path, data)
        except OSError as error:
            raise unwritable(path, option, error) from None


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
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # writing to an open file does not say which
        raise
    sync_directory(path.parent)


def write_new_bytes(path: str | Path, data: bytes, option: str, replacing: bytes | None = None) -> None:
    """Write a `new_file`, or replace one that has exactly the bytes `replacing`. Errors as for `new_file`."""
    path = Path(path)
    if replacing is not None and path.is_file() and path.read_bytes() == replacing:
        replace_file(path, data, option)
        return
    with new_file(path, option) as temporary:
        temporary.write_bytes(data)


def replace_directory(tmp: str | Path, final: str | Path) -> None:
    """Replace the directory `final` with the finished directory `tmp` on the same file system.

    Everything in `tmp` is flushed to disk first. An existing `final` is exchanged with it in one operation, so that
    there is no moment without one. Where the system cannot do so, it is first renamed to `.<name>.previous`; after a
    crash in between, the next reader or writer renames it back (`restore`). Raises OSError.
    """
    tmp, final = Path(tmp), Path(final)
    for path in (*sorted(tmp.rglob("*")), tmp):
        _flush(path)
    previous = final.with_name(f".{final.name}.previous")
    exchanged = final.exists() and _exchange(tmp, final)
    while not exchanged:
        if final.exists():
            remove(previous)
            final.rename(previous)
        try:
            tmp.rename(final)
            break
        except BaseException as error:
            restore(final)
            if getattr(error, "errno", None) not in (errno.ENOTEMPTY, errno.EEXIST):  # a reader restored it
                raise
    sync_directory(final.parent)
    remove(tmp if exchanged else previous)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one operation; False where the system, or the file system, cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux
        return False
    return not rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE)


def sha256(data: bytes) -> str:
    """The SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    """A file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk; no-op on Windows, which cannot open directories."""
    if os.name != "nt":
        _flush(directory)


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
