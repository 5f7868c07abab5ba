"""Directories as archives: POSIX.1-1988 ustar of regular files and empty directories, the same for the same files.

An archive is untrusted even if it was sealed, because anybody can seal to a recipient: only what `pack` and `stream`
write is read.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from wgpu_lora.errors import UserError
from wgpu_lora.files.paths import is_path
from wgpu_lora.names.text import escape_unprintable

BLOCK = tarfile.BLOCKSIZE  # 512 bytes: members are padded to it, and two of zeros end an archive
END = bytes(2 * BLOCK)
MAX_MEMBERS = 10_000
MAX_MEMBER_BYTES = 8**11 - 1  # what 11 octal digits of a header can say
PIECE = 1 << 20


def pack(files: Mapping[str, bytes | bytearray | memoryview]) -> bytes:
    """An archive of files in memory, by relative paths with "/" between directories, in the order of their names.

    Raises:
        UserError: a name cannot be in an archive, or does not fit into its header.
    """
    parts: list[bytes | bytearray | memoryview] = []
    _check_names(list(files))
    for name in sorted(files):
        parts += [_header(name, len(files[name])), files[name], bytes(-len(files[name]) % BLOCK)]
    return b"".join([*parts, END])


def unpack(data: bytes | bytearray | memoryview) -> dict[str, bytes]:
    """The files of an archive, as copies.

    Raises:
        UserError: it is not an archive of `pack` or `stream`: damaged, or with links, unsafe names, or too many files.
    """
    return {name: bytes(view) for name, view in _members(memoryview(data)) if view is not None}


def extract(data: memoryview, directory: Path) -> None:
    """Writes the files of an archive into an empty directory that nobody else can write to.

    Raises:
        UserError: as `unpack`. OSError: a file cannot be written.
    """
    for name, view in _members(data):
        path = directory / name
        (path if view is None else path.parent).mkdir(parents=True, exist_ok=True)
        if view is not None:
            with path.open("xb") as file:
                file.write(view)


def stream(directory: Path) -> Iterator[bytes]:
    """The archive of a directory in pieces, without it ever being whole in memory. Raises UserError: it holds a link or
    special file, has no file, cannot be read, or changes meanwhile."""
    try:
        entries = sorted(_walk(directory, directory))
        if not any(size is not None for _, size in entries):
            raise UserError(f"{directory} holds no file: give a directory with files.")
        _check_names([name for name, _ in entries])
        for name, size in entries:
            yield _header(name, size)
            if size is not None:
                yield from _content(directory / name, size)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}): check its permissions.") from None
    yield END


def _walk(directory: Path, top: Path) -> Iterator[tuple[str, int | None]]:
    """(name, bytes) of all files below, and (name, None) of empty directories."""
    with os.scandir(directory) as entries:
        children = sorted(entries, key=lambda entry: entry.name)
    for entry in children:
        name, info = Path(entry.path).relative_to(top).as_posix(), entry.stat(follow_symlinks=False)
        if stat.S_ISREG(info.st_mode):
            yield name, info.st_size
        elif stat.S_ISDIR(info.st_mode):
            yield from list(_walk(Path(entry.path), top)) or [(name, None)]
        else:
            raise UserError(
                f"{entry.path} is a link or a special file: replace it by what it stands for, or remove it."
            )


def _content(path: Path, size: int) -> Iterator[bytes]:
    remaining = size
    with path.open("rb") as file:
        while remaining >= 0 and (piece := file.read(PIECE)):
            remaining -= len(piece)
            yield piece
    if remaining:
        raise UserError(f"{path} has changed while it was read: seal it again when nobody writes to it.")
    yield bytes(-size % BLOCK)


def _check_names(names: Sequence[str]) -> None:
    """Raises UserError unless these names can be in one archive, and stay below where it is unpacked, on any system."""
    if len(names) > MAX_MEMBERS:
        raise UserError(f"The archive holds more than {MAX_MEMBERS:,} files: seal fewer at a time.")
    unique = set(names)
    if len(unique) < len(names):
        raise UserError("The archive holds a name twice: do not open it.")
    for name in names:
        text, unsafe = f"{escape_unprintable(name):.80}", "\\" in name or ":" in name or not is_path(name)
        if unsafe or any(part in ("", ".", "..") for part in name.split("/")):
            raise UserError(f"The archive holds the name '{text}', which is not a plain relative path: do not open it.")
        if any(str(parent) in unique for parent in PurePosixPath(name).parents):
            raise UserError(f"The archive holds {text} below a file: do not open it.")


def _header(name: str, size: int | None) -> bytes:
    info, label = tarfile.TarInfo(name), f"{escape_unprintable(name):.80}"
    info.size, info.mode = size or 0, 0o600
    if size is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o700
    if info.size > MAX_MEMBER_BYTES:
        raise UserError(f"{label} is longer than {MAX_MEMBER_BYTES:,} bytes, more than an archive can hold: split it.")
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    except ValueError:
        raise UserError(f"{label} is too long a name for an archive (ustar): shorten it.") from None


def _members(data: memoryview) -> list[tuple[str, memoryview | None]]:
    """(name, content) of an archive's files, and (name, None) of its directories."""
    members: list[tuple[str, memoryview | None]] = []
    at = 0
    while data[at : at + len(END)] != END:
        try:
            info = tarfile.TarInfo.frombuf(bytes(data[at : at + BLOCK]), "utf-8", "strict")
        except (tarfile.HeaderError, ValueError):
            raise UserError("The archive is damaged: seal its directory again.") from None
        at += BLOCK
        if info.type not in (tarfile.REGTYPE, tarfile.DIRTYPE):
            raise UserError(
                "The archive was not made by wgpu-lora protect seal: decrypt it with -o NAME.tar, and list it with tar."
            )
        if not 0 <= info.size <= len(data) - at:
            raise UserError("The archive ends too early: seal its directory again.")
        if len(members) > MAX_MEMBERS:
            break
        members.append((info.name, data[at : at + info.size] if info.type == tarfile.REGTYPE else None))
        at += 0 if info.type == tarfile.DIRTYPE else -(-info.size // BLOCK) * BLOCK
    _check_names([name for name, _ in members])
    return members
