"""Sealed files and directories on disk, and the records beside them, by whose digest they are believed.

Also what `protect seal` and `protect open` do: paths, and - for standard input and output as the `age` program has it.
"""

from __future__ import annotations

import io
import json
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, TextIO

from wgpu_lora.errors import UserError, reason
from wgpu_lora.files.atomic import check_new, file_digest, new_directory, new_file, write_new_bytes
from wgpu_lora.files.json_files import read_json
from wgpu_lora.files.paths import check_path
from wgpu_lora.files.typed_json import Count, Sha256, read_as
from wgpu_lora.names.spelling import flag
from wgpu_lora.protect.sealed import archive
from wgpu_lora.protect.sealed.age_streams import (
    parse_recipients,
    read_recipients,
    seal_stream,
    unseal_stream,
)  # fmt: skip
from wgpu_lora.protect.sealed.keys import DataKey

ARCHIVE = ".tar.age"
STANDARD = "-"


@dataclass(frozen=True)
class SealRecord:
    """What a sealed file is, in NAME.age.json beside it: nothing that says what is in it.

    Attributes:
        sha256: digest of the sealed file. bytes: its size.
        rows: of a JSONL file, lines that are not blank; None for other files.
        recipients: who can open it.
    """

    sha256: Sha256
    bytes: Count
    rows: Count | None
    recipients: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> SealRecord:
        """Reads NAME.age.json. Raises UserError if it is not such a record."""
        return read_as(cls, read_json(path), f"{path} is not the record of a sealed file")


def record_path(sealed: Path) -> Path:
    return sealed.with_name(sealed.name + ".json")


def recipients_of(arguments: Sequence[str]) -> list[str]:
    """Recipients, and those in recipients files, which are given as @FILE. Raises UserError: there is none, or a file
    cannot be read."""
    if not arguments:
        raise UserError("--to is missing: give who can open it, age1..., as wgpu-lora protect keygen prints it.")
    return [
        recipient for text in arguments for recipient in (read_recipients(text[1:]) if text.startswith("@") else [text])
    ]


def default_output(path: str) -> str:
    """What the sealed file of a path is called. Raises UserError: it has no name."""
    source = Path(path)
    if path == STANDARD:
        raise UserError("Standard input has no name: give -o FILE, or -o - for standard output.")
    if source.name in ("", ".."):
        raise UserError(f"{path} has no name to call its sealed file by: give -o FILE.")
    return str(source.with_name(source.name + (ARCHIVE if source.is_dir() else ".age")))


# -- sealing -----------------------------------------------------------------------------------------------------------


def seal_path(
    path: str | Path,
    to: str | Path,
    recipients: Sequence[str],
    stdin: TextIO | None = None,
    stdout: TextIO | None = None,
) -> SealRecord | None:
    """Seals a file, or a directory as an archive, to a new file, and writes its record beside it.

    Args:
        path, to: - for standard input and output, which gets no record.

    Raises:
        UserError: a recipient is not one; the path cannot be read, or holds links; or `to` exists or cannot be written.
            Then nothing is left of it.
    """
    parse_recipients(recipients)
    standard, path = str(path) == STANDARD, Path(path)
    reader = _PieceReader(_read_pieces(_stream(stdin, "input"), "Standard input") if standard else _pieces(path))
    if str(to) == STANDARD:
        target = _standard_output(stdout)
        seal_stream(reader, target, recipients)
        target.flush()
        return None
    to = Path(to)
    check_path(path)
    check_path(to)
    if not standard and path.is_dir() and to.resolve().is_relative_to(path.resolve()):
        raise UserError(f"{to} would be in the directory that it seals: choose a path elsewhere.")
    record_file, is_rows = record_path(to), to.name.endswith(".jsonl.age") if standard else path.suffix == ".jsonl"
    check_new(record_file, flag("output"))
    with ExitStack() as undone:
        with new_file(to, flag("output")) as temporary:
            with temporary.open("xb") as file:
                seal_stream(reader, file, recipients)
            digest, size, unique = file_digest(temporary), temporary.stat().st_size, tuple(dict.fromkeys(recipients))
            record = SealRecord(digest, size, reader.rows if is_rows else None, unique)
            write_new_bytes(record_file, (json.dumps(asdict(record), indent=2) + "\n").encode(), flag("output"))
            undone.callback(record_file.unlink)  # if the file does not get its name
        undone.pop_all()
    return record


def _pieces(path: Path) -> Iterator[bytes]:
    """The content of a file, or the archive of a directory. Raises UserError if it cannot be read, or is empty."""
    try:
        if path.is_dir():
            yield from archive.stream(path)
            return
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file or directory: seal a file, or standard input with -.")
        with path.open("rb") as file:
            yield from _read_pieces(file, str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}): check the path.") from None


def _read_pieces(file: IO[bytes], where: str) -> Iterator[bytes]:
    first = file.read(archive.PIECE)
    if not first:
        raise UserError(f"{where} is empty: there is nothing to seal.")
    yield first
    yield from iter(partial(file.read, archive.PIECE), b"")


class _PieceReader:
    """A reader of pieces that counts lines that are not blank."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source, self._buffer, self._inside = source, b"", False
        self.rows = 0

    def read(self, size: int = -1) -> bytes:
        if not self._buffer:
            self._buffer = next(self._source, b"")
            self._count(self._buffer)
        piece = self._buffer if size < 0 else self._buffer[:size]
        self._buffer = self._buffer[len(piece) :]
        return piece

    def _count(self, data: bytes) -> None:
        for number, line in enumerate(data.split(b"\n")):
            self._inside = self._inside and not number
            if not self._inside and line.strip():
                self.rows += 1
                self._inside = True


# -- opening -----------------------------------------------------------------------------------------------------------


def unseal_path(
    sealed: str | Path, to: str | Path, key: DataKey, stdin: TextIO | None = None, stdout: TextIO | None = None
) -> None:
    """Opens a sealed file to a new file, or an archive (NAME.tar.age) to a new directory, unless that is named *.tar.

    Until everything has been authenticated, it is in a private directory beside `to`. What is opened can be read by
    this user only (on Windows, by whom its directory says).

    Args:
        sealed, to: - for standard input and output, which gets each chunk as soon as it has been authenticated.

    Raises:
        TamperedError: see `unseal_stream`. UserError: a path cannot be read or written, or an archive is unsafe.
            In both cases nothing is left.
    """
    standard, sealed, where = str(sealed) == STANDARD, Path(sealed), str(sealed)
    unpack = sealed.name.endswith(ARCHIVE) and Path(to).suffix != ".tar"
    if standard:
        source, where = _stream(stdin, "input"), "Standard input"
    elif sealed.exists() and not sealed.is_file():
        raise UserError(f"{sealed} is not a file: give the path of a sealed file.")
    with ExitStack() as stack:
        if not standard:
            try:
                source = stack.enter_context(sealed.open("rb"))
            except (OSError, ValueError) as error:
                raise UserError(f"{sealed} cannot be read ({reason(error)}): check the path.") from None
        if str(to) == STANDARD:
            target = _standard_output(stdout)
            unseal_stream(source, target, key, where)
            target.flush()
        elif not unpack:
            with new_file(to, flag("output"), private=True) as temporary, temporary.open("xb") as file:
                unseal_stream(source, file, key, where)
        else:
            temporary = stack.enter_context(new_directory(to, flag("output"), private=True))
            whole = stack.enter_context(tempfile.TemporaryFile(dir=temporary))
            unseal_stream(source, whole, key, where)
            whole.flush()
            if not whole.tell():  # cannot be mapped
                archive.extract(memoryview(b""), temporary)
            with mmap.mmap(whole.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                archive.extract(view, temporary)


def _standard_output(stdout: TextIO | None) -> BinaryIO | io.FileIO:
    """Standard output, not buffered. A reader that goes away is an error here: a part of the data is no success."""
    target = _stream(stdout, "output")
    try:
        number = target.fileno()
    except (OSError, ValueError):  # not a file
        return target
    target.flush()
    return io.FileIO(number, "w", closefd=False)


def _stream(stream: TextIO | None, direction: str) -> BinaryIO:
    if stream is None:  # closed before the start
        raise UserError(f"Standard {direction} is closed: give a path instead of -.")
    return stream.buffer
