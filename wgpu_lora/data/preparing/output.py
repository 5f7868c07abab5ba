"""The output directory: written beside its place, and moved there when it is complete."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from wgpu_lora.atomic import UMASK, replace_directory, sweep
from wgpu_lora.data.preparing.inputs import REJECTED, REPORT, is_result
from wgpu_lora.data.preparing.kinds import FILES, VALID
from wgpu_lora.errors import UserError
from wgpu_lora.names.naming import flag
from wgpu_lora.strict_json import to_json

FULL = (errno.ENOSPC, errno.EFBIG, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC))
WRITTEN = {*FILES.values(), VALID, REPORT, REJECTED}


class Lines:
    """A JSONL file that is being written: its rows, bytes and SHA-256."""

    def __init__(self, path: Path) -> None:
        self._path, self._hash = path, hashlib.sha256()
        self._file: IO[bytes] | None = None
        self.rows = self.bytes = 0

    def add(self, line: bytes) -> None:
        """Add a line that ends with a line break."""
        if self._file is None:
            self._file = self._path.open("wb", buffering=1 << 20)
        self._file.write(line)
        self._hash.update(line)
        self.rows, self.bytes = self.rows + 1, self.bytes + len(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def facts(self) -> dict[str, Any]:
        return {"rows": self.rows, "bytes": self.bytes, "sha256": self._hash.hexdigest()}


def encoded(row: Any) -> bytes:
    """A row as a line of JSONL; numbers that JSON lacks become null.

    Raises:
        UnicodeEncodeError: a text has a lone surrogate. TypeError: a value is not of JSON. RecursionError.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = to_json(row, ensure_ascii=False)
    return text.encode() + b"\n"


def refuse_output(output: Path, overwrite: bool) -> None:
    """Raise UserError if a directory exists that may not be replaced."""
    if output.is_symlink() or not output.exists():
        if output.is_symlink():
            raise UserError(f"{output} is a link: give {flag('output')} the directory that it leads to.")
        return
    if output.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise UserError(f"{output} holds the current directory: give {flag('output')} a directory in it.")
    if not output.is_dir():
        raise UserError(f"{output} is a file: give {flag('output')} a directory.")
    there = {path.name for path in output.iterdir()}
    if not there:
        return
    if not is_result(output) or there - WRITTEN:
        others = sorted(there - WRITTEN or there)
        raise UserError(
            f"{output} holds other files ({others[0]!a:.80}): give {flag('output')} a directory that does not exist."
        )
    if not overwrite:
        raise UserError(f"{output} has been prepared already: give {flag('overwrite')} to replace it.")


@contextmanager
def new_directory(output: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary directory that replaces `output` at the end of the block; if it fails, nothing is left.

    Raises:
        UserError: the output exists, or cannot be written, or another process is writing it.
    """
    refuse_output(output, overwrite)
    parent = output.absolute().parent
    with ExitStack() as stack:
        try:
            stack.enter_context(_made(parent))
            Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=parent)).rmdir()  # fails if unwritable
            lock = FileLock(parent / f".{output.name}.lock")
            lock.acquire(timeout=0)
            stack.callback((parent / f".{output.name}.lock").unlink, missing_ok=True)
            stack.callback(lock.release)
            sweep(parent, re.compile(re.escape(output.name)))
            place = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=parent))
        except Timeout:
            raise UserError(f"Another process is writing to {output}: wait for it, or choose another.") from None
        except OSError as error:
            raise UserError(
                f"{output} cannot be written ({error.strerror}): choose another {flag('output')}."
            ) from None
        try:
            yield place
            place.chmod(0o777 & ~UMASK)  # mkdtemp makes directories private
            refuse_output(output, overwrite)  # it may have been made meanwhile
            replace_directory(place, output.absolute())
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise UserError(
                f"{output} cannot be written ({error.strerror}), so nothing was: free space, or choose another "
                f"{flag('output')}."
            ) from error
        finally:
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _made(directory: Path) -> Iterator[None]:
    """Makes a directory, and removes what it made if the block fails."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for place in missing:
                place.rmdir()
        raise
