"""A host's shelf: the newest copy of each unit's directory, of which a crash at any time leaves the old or the new one.

<root>/shelf/<run>/<task>/fence.json   the oldest epoch that may still write
                          copy.json    the copy and its files; replaced last, atomically
                          blobs/       the files, by digest
                          incoming/    files of a copy that is not complete yet
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wgpu_lora.atomic import file_digest, sync_directory, write_bytes_atomic
from wgpu_lora.cluster.facts import Copy, from_plain, to_plain
from wgpu_lora.cluster.node.layout import Layout
from wgpu_lora.cluster.node.listing import (
    FileFacts,
    Listing,
    checked_listing,
    listing_digest,
    plain_listing,
)
from wgpu_lora.errors import UserError, reason
from wgpu_lora.json_files import read_json, to_json
from wgpu_lora.locks import lock_file

SCHEMA = 1
FENCE, COPY, BLOBS, INCOMING = "fence.json", "copy.json", "blobs", "incoming"
PIECE = 4 << 20  # bytes of a file that are sent at once
RESERVE = 64 << 20  # bytes of the disk that stay free
MAX_JSON, MAX_PARTS = 64 << 20, 1 << 20


class Fenced(UserError):
    """The unit has a newer epoch, which alone may write."""


class Shelf:
    """The copies below `<root>/shelf`. Its methods may be called by several threads and processes."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self._sound: set[str] = set()  # digests of copies whose files this process has read

    # -- epochs ----------------------------------------------------------------------------------------------------

    def fence(self, unit: str, epoch: int) -> int:
        """Refuse copies of epochs before this one from now on; returns the oldest epoch that may write.

        Raises:
            UserError: the disk refuses.
        """
        with self._locked(unit) as place:
            return self._fence(place, epoch)

    def _fence(self, place: Path, epoch: int) -> int:
        now = self._epoch(place)
        if epoch > now:
            write_bytes_atomic(place / FENCE, (to_json({"schema": SCHEMA, "epoch": epoch}) + "\n").encode())
        return max(now, epoch)

    def _epoch(self, place: Path) -> int:
        if not (place / FENCE).exists():
            return 0
        epoch = read_json(place / FENCE).get("epoch")
        if type(epoch) is not int:
            raise UserError(f"{place / FENCE} is damaged: remove it, and the copies beside it.")
        return epoch

    def _check_epoch(self, place: Path, unit: str, epoch: int) -> None:
        if self._fence(place, epoch) > epoch:
            raise Fenced(f"{unit} has been placed again since epoch {epoch}: its copy is not taken any more.")

    # -- writing ---------------------------------------------------------------------------------------------------

    def begin(self, unit: str, epoch: int, files: Listing) -> dict[str, int]:
        """Announce a copy; returns the digests that are missing, with the bytes of each that are here already.

        Raises:
            Fenced: a newer epoch has been placed. UserError: the listing is not allowed, or the disk lacks the space.
        """
        checked_listing(plain_listing(files))
        with self._locked(unit) as place:
            self._check_epoch(place, unit, epoch)
            missing, sizes = {}, {file.digest: file.size for file in files}
            for digest, size in sizes.items():
                blob, part = place / BLOBS / digest, place / INCOMING / digest
                if not (blob.is_file() and blob.stat().st_size == size):
                    missing[digest] = part.stat().st_size if part.is_file() and part.stat().st_size <= size else 0
            (place / INCOMING).mkdir(exist_ok=True)
            for part in (place / INCOMING).iterdir():
                if not missing.get(part.name):
                    part.unlink()
            self._check_space(place, sum(sizes[digest] - have for digest, have in missing.items()))
            return missing

    def put(self, unit: str, epoch: int, file: FileFacts, offset: int, data: bytes) -> None:
        """Append a piece of a file; its digest is checked with the last one.

        Raises:
            Fenced: a newer epoch has been placed.
            UserError: the piece does not continue the file, or exceeds it, or the file has another digest.
        """
        (file,) = checked_listing(plain_listing([file]))
        with self._locked(unit) as place:
            self._check_epoch(place, unit, epoch)
            part = place / INCOMING / file.digest
            part.parent.mkdir(exist_ok=True)
            have = part.stat().st_size if part.is_file() else 0
            if offset != have or offset + len(data) > file.size or len(data) > PIECE:
                raise UserError(f"A piece of {file.path} does not continue what {_here()} has: copy it again.")
            with part.open("ab") as out:
                out.write(data)
                if offset + len(data) == file.size:
                    out.flush()
                    os.fsync(out.fileno())
            if offset + len(data) == file.size:
                self._keep(place, part, file)

    def take(self, unit: str, epoch: int, file: FileFacts, source: Path) -> None:
        """Take over a file of this host by a hard link, or by copying it where that is not possible.

        The file must not change afterwards. Raises as `put`.
        """
        (file,) = checked_listing(plain_listing([file]))
        with self._locked(unit) as place:
            self._check_epoch(place, unit, epoch)
            part = place / INCOMING / file.digest
            part.parent.mkdir(exist_ok=True)
            part.unlink(missing_ok=True)
            link_or_copy(source, part)
            if part.stat().st_size != file.size:
                part.unlink()
                raise UserError(f"{file.path} has changed while it was copied: copy it again.")
            self._keep(place, part, file)

    def _keep(self, place: Path, part: Path, file: FileFacts) -> None:
        if file_digest(part) != file.digest:
            part.unlink()
            raise UserError(f"{file.path} has changed on its way to {_here()} (its SHA-256 differs): copy it again.")
        (place / BLOBS).mkdir(exist_ok=True)
        part.replace(place / BLOBS / file.digest)

    def commit(self, copy: Copy, files: Listing) -> Copy:
        """Make a copy the unit's newest, once all its files are here.

        Raises:
            Fenced: a newer epoch has been placed. UserError: a file is missing, or the digest is another one.
        """
        files = checked_listing(plain_listing(files))
        if listing_digest(files) != copy.digest:
            raise UserError(f"The copy of {copy.unit} has another list of files than announced: copy it again.")
        with self._locked(copy.unit) as place:
            self._check_epoch(place, copy.unit, copy.epoch)
            for file in files:
                blob = place / BLOBS / file.digest
                if not (blob.is_file() and blob.stat().st_size == file.size):
                    raise UserError(f"{file.path} of {copy.unit} has not arrived on {_here()}: copy it again.")
            if (place / BLOBS).is_dir():
                sync_directory(place / BLOBS)
            said = {"schema": SCHEMA, "copy": to_plain(copy), "files": plain_listing(files)}
            write_bytes_atomic(place / COPY, (to_json(said) + "\n").encode())
            self._sound.add(copy.digest)
            kept = {file.digest for file in files}
            for blob in (place / BLOBS).iterdir() if (place / BLOBS).is_dir() else ():
                if blob.name not in kept:
                    blob.unlink()
            shutil.rmtree(place / INCOMING, ignore_errors=True)
        return copy

    # -- reading ---------------------------------------------------------------------------------------------------

    def held(self, unit: str) -> Copy | None:
        """The newest copy of a unit; None if there is none, or if it is damaged."""
        found = self._read(unit)
        if found is None:
            return None
        copy, files = found
        if copy.digest not in self._sound:
            place = self.layout.shelved(unit) / BLOBS
            with suppress(OSError):
                if all((place / f.digest).is_file() and file_digest(place / f.digest) == f.digest for f in files):
                    self._sound.add(copy.digest)
        return copy if copy.digest in self._sound else None

    def files(self, unit: str, digest: str) -> list[FileFacts]:
        """The files of a copy.

        Raises:
            UserError: the shelf has no such copy, for example since it has a newer one.
        """
        found = self._read(unit)
        if found is None or found[0].digest != digest:
            raise UserError(f"{_here()} has no copy {digest:.12} of {unit} any more: use a newer one.")
        return found[1]

    def read(self, unit: str, digest: str, path: str, offset: int, size: int = PIECE) -> bytes:
        """A piece of a file of a copy, at most PIECE bytes; empty at its end. Raises UserError, as `files` does."""
        return read_piece(self.path(unit, digest, path), offset, size)

    def path(self, unit: str, digest: str, path: str) -> Path:
        """The path of a file of a copy on this host. Raises UserError, as `files` does."""
        for file in self.files(unit, digest):
            if file.path == path:
                return self.layout.shelved(unit) / BLOBS / file.digest
        raise UserError(f"The copy of {unit} has no file {path!a:.120}: ask for one of its list.")

    def _read(self, unit: str) -> tuple[Copy, list[FileFacts]] | None:
        path = self.layout.shelved(unit) / COPY
        if not path.exists():
            return None
        try:
            said = read_json(path, MAX_JSON, MAX_PARTS)
            copy, files = from_plain(Copy, said.get("copy")), checked_listing(said.get("files"))
        except (UserError, ValueError):
            return None
        return (copy, files) if listing_digest(files) == copy.digest and copy.unit == unit else None

    def forget(self, run: str) -> None:
        """Remove everything of a run from this host: its copies, and the directories that its units trained in."""
        for directory in self.layout.of_run(run):
            shutil.rmtree(directory, ignore_errors=True)

    # -- the disk --------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self, unit: str) -> Iterator[Path]:
        place = self.layout.shelved(unit)
        try:
            place.mkdir(parents=True, exist_ok=True)
            with lock_file(place / ".lock", 60):
                yield place
        except OSError as error:  # FileLock's timeout is one, too
            raise UserError(
                f"{place} on {_here()} cannot be written ({reason(error)}): make room on its disk."
            ) from None

    def _check_space(self, place: Path, missing: int) -> None:
        free = shutil.disk_usage(place).free
        if missing + RESERVE > free:
            raise UserError(
                f"The disk of {place} on {_here()} has {free:,} bytes free, and the copy needs {missing:,}: make room."
            )


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file another name on the same disk, or copy it. Raises OSError."""
    if source.is_symlink():
        raise UserError(f"{source} is a link, which is not copied: replace it by the file.")
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def read_piece(path: Path, offset: int, size: int) -> bytes:
    """At most PIECE bytes of a file. Raises UserError if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(offset, 0))
            return file.read(min(max(size, 0), PIECE))
    except OSError as error:
        raise UserError(f"{path} on {_here()} cannot be read ({reason(error)}): copy it again.") from None


def _here() -> str:
    return socket.gethostname()
