"""What `protect seal` and `protect open` do: paths, and - for standard input and output as the `age` program has it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TextIO

from wgpu_lora.errors import UserError
from wgpu_lora.protect.sealed.archive import PIECE
from wgpu_lora.protect.sealed.files import (
    ARCHIVE,
    PieceReader,
    SealRecord,
    open_sealed,
    pieces,
    seal_path,
    seal_pieces,
    unseal_file,
    unseal_path,
)
from wgpu_lora.protect.sealed.keys import DataKey
from wgpu_lora.protect.sealed.streams import parse_recipients, read_recipients, seal_stream, unseal_stream

STANDARD = "-"


def recipients_of(given: Sequence[str]) -> list[str]:
    """Recipients, and those in recipients files, which are given as @FILE.

    Raises:
        UserError: there is none, one is not one, or a file cannot be read.
    """
    if not given:
        raise UserError("--to is missing: give who can open it, age1..., as wgpu-lora protect keygen prints it.")
    found = [one for text in given for one in (read_recipients(text[1:]) if text.startswith("@") else [text])]
    parse_recipients(found)
    return found


def seal_to(
    path: str, output: str | None, recipients: Sequence[str], stdin: TextIO | None, stdout: TextIO | None
) -> tuple[Path, SealRecord] | None:
    """Seals a path or standard input; None if it went to standard output, which gets no record.

    Raises:
        UserError: see `seal_path`.
    """
    if path == STANDARD and output is None:
        raise UserError("Standard input has no name: give -o FILE, or -o - for standard output.")
    source = _all_of(_bytes_of(stdin, "input")) if path == STANDARD else None
    if output == STANDARD:
        target = _output(stdout)
        seal_stream(PieceReader(source or pieces(Path(path))), target, recipients)
        target.flush()
        return None
    if source and output:
        to = Path(output)
        return to, seal_pieces(source, to, recipients, rows=to.name.endswith(".jsonl.age"))
    given = Path(path)
    if not output and given.name in ("", ".."):
        raise UserError(f"{path} has no name to call its sealed file by: give -o FILE.")
    to = Path(output) if output else given.with_name(given.name + (ARCHIVE if given.is_dir() else ".age"))
    return to, seal_path(given, to, recipients)


def open_to(sealed: str, output: str, key: DataKey, stdin: TextIO | None, stdout: TextIO | None) -> None:
    """Opens a path or standard input.

    Raises:
        TamperedError, UserError: see `unseal_path`.
    """
    if output != STANDARD and sealed != STANDARD:
        unseal_path(sealed, output, key)
        return
    where = "Standard input" if sealed == STANDARD else sealed
    target = _output(stdout) if output == STANDARD else None
    with nullcontext(_bytes_of(stdin, "input")) if sealed == STANDARD else open_sealed(Path(sealed)) as source:
        if target is not None:
            unseal_stream(source, target, key, where)
            target.flush()
        else:
            unseal_file(source, Path(output), key, where)


def _output(stdout: TextIO | None) -> BinaryIO | io.FileIO:
    """Standard output, not buffered. A reader that goes away is an error here: a part of the data is no success."""
    target = _bytes_of(stdout, "output")
    try:
        number = target.fileno()
    except (OSError, ValueError):  # not a file
        return target
    target.flush()
    return io.FileIO(number, "w", closefd=False)


def _bytes_of(stream: TextIO | None, what: str) -> BinaryIO:
    if stream is None:  # closed before the start
        raise UserError(f"Standard {what} is closed: give a path instead of -.")
    return stream.buffer


def _all_of(stdin: BinaryIO) -> Iterator[bytes]:
    first = stdin.read(PIECE)
    if not first:
        raise UserError("Standard input is empty: there is nothing to seal.")
    return chain([first], iter(partial(stdin.read, PIECE), b""))
