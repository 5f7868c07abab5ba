"""Data that drivers have sent to this host, by the digest of their list of files: `<root>/sent/<digest>/<name>`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wgpu_lora.atomic import file_digest, replace_directory, write_bytes_atomic
from wgpu_lora.cluster.facts import from_plain, to_plain
from wgpu_lora.cluster.node.layout import checked_digest
from wgpu_lora.cluster.node.shelf import PIECE, RESERVE, read_piece
from wgpu_lora.cluster.spec.sending import Parcel, check_parcel
from wgpu_lora.errors import UserError, reason
from wgpu_lora.json_files import read_json, to_json
from wgpu_lora.locks import lock_file


class Sent:
    """Parcels below a folder. A parcel is there as a whole, or not at all; one that was interrupted goes on."""

    def __init__(self, folder: Path):
        self.folder = folder

    def has(self, digest: str) -> bool:
        """Whether a parcel is there; asking keeps it from getting old. Raises UserError if that is no digest."""
        place = self.folder / checked_digest(digest)
        if there := place.is_dir():
            with suppress(OSError):
                os.utime(place)
        return there

    def begin(self, parcel: Parcel) -> dict[str, int]:
        """Announce a parcel; returns the digests of the files that are missing, with the bytes that are here already.

        Raises:
            UserError: the parcel is not allowed, or the disk lacks the space.
        """
        check_parcel(parcel)
        if self.has(parcel.digest):
            return {}
        with self._locked(parcel.digest) as place:
            sizes = {file.digest: file.size for file in parcel.files}
            have = {part.name: part.stat().st_size for part in place.iterdir()}
            missing = {digest: have.get(digest, 0) for digest, size in sizes.items() if have.get(digest, -1) != size}
            free, needed = shutil.disk_usage(place).free, sum(sizes[d] - h for d, h in missing.items())
            if needed + RESERVE > free:
                raise UserError(f"{place} has {free:,} bytes free; the data need {needed:,}: make room on that disk.")
            return missing

    def put(self, parcel: str, digest: str, offset: int, data: bytes) -> None:
        """Append a piece of a file. Raises UserError if it does not continue what is here."""
        with self._locked(checked_digest(parcel)) as place:
            part = place / checked_digest(digest)
            if offset != (part.stat().st_size if part.exists() else 0) or len(data) > PIECE:
                raise UserError("A piece of sent data does not continue what the host has: send it again.")
            with part.open("ab") as out:
                out.write(data)

    def commit(self, parcel: Parcel) -> Path:
        """Check all files and give the parcel its place, which is returned.

        Raises:
            UserError: a file is missing, or is another one.
        """
        check_parcel(parcel)
        final = self.folder / parcel.digest
        if self.has(parcel.digest):
            return final / parcel.name
        with self._locked(parcel.digest) as place:
            hidden = self.folder / f".{parcel.digest}.tmp"
            shutil.rmtree(hidden, ignore_errors=True)
            for file in parcel.files:
                part, path = place / file.digest, hidden / file.path
                if not part.is_file() or part.stat().st_size != file.size or file_digest(part) != file.digest:
                    part.unlink(missing_ok=True)
                    raise UserError(f"{file.path} has not arrived as it was sent: send it again.")
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(part, path)
            self._place(parcel, hidden)
        return final / parcel.name

    def adopt(self, parcel: Parcel, path: Path) -> Path:
        """Make a file or a folder of this host a parcel: it is moved to its place, which is returned. The second time
        changes nothing.

        Raises:
            UserError: the parcel is not allowed, or the disk refuses.
        """
        check_parcel(parcel)
        final = self.folder / parcel.digest
        with self._locked(parcel.digest):
            if not self.has(parcel.digest):
                hidden = self.folder / f".{parcel.digest}.tmp"
                shutil.rmtree(hidden, ignore_errors=True)
                hidden.mkdir()
                path.rename(hidden / parcel.name)
                self._place(parcel, hidden)
        return final / parcel.name

    def remove(self, digest: str) -> None:
        """Remove a parcel that is not needed any more, if it is here."""
        with self._locked(checked_digest(digest)) as place:
            (self.folder / f"{digest}.json").unlink(missing_ok=True)
            shutil.rmtree(self.folder / digest, ignore_errors=True)
            shutil.rmtree(place, ignore_errors=True)

    def _place(self, parcel: Parcel, hidden: Path) -> None:
        """Give a parcel's folder its name, after its list."""
        said = (to_json(to_plain(parcel)) + "\n").encode()
        write_bytes_atomic(self.folder / f"{parcel.digest}.json", said)
        replace_directory(hidden, self.folder / parcel.digest)
        shutil.rmtree(self.folder / f".{parcel.digest}.incoming", ignore_errors=True)

    def parcel(self, digest: str) -> Parcel:
        """What a parcel consists of, for a host that lacks it. Raises UserError if it is not here."""
        path = self.folder / f"{checked_digest(digest)}.json"
        if not self.has(digest) or not path.is_file():
            raise UserError(f"The data {digest:.12} have not been sent to {self.folder}: start the run again.")
        try:
            return from_plain(Parcel, read_json(path))
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): start the run again.") from None

    def read(self, digest: str, path: str, offset: int) -> bytes:
        """A piece of a parcel's file. Raises UserError if it is not here."""
        if path not in {file.path for file in self.parcel(digest).files}:
            raise UserError(f"The data {digest:.12} have no file {path!a:.80}: ask for one of their list.")
        return read_piece(self.folder / digest / path, offset, PIECE)

    @contextmanager
    def _locked(self, digest: str) -> Iterator[Path]:
        place = self.folder / f".{digest}.incoming"
        try:
            place.mkdir(parents=True, exist_ok=True)
            with lock_file(self.folder / f".{digest}.lock", 60):
                yield place
        except OSError as error:
            raise UserError(f"{place} cannot be written ({reason(error)}): make room on that disk.") from None
