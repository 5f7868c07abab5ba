"""Files that hosts lack, by content: data that only the driver's machine has (`--send-data`), and teacher caches."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from filelock import FileLock

from wgpu_lora.atomic import file_digest
from wgpu_lora.cluster.checkpoint_store import Store, is_plain_path, restore_files, store_files
from wgpu_lora.cluster.cluster_paths import DIGEST, SENDABLE, sent_directory
from wgpu_lora.cluster.messages import Parcel, StoredFile, Task
from wgpu_lora.errors import StorageError, UserError

MAX_BYTES, MAX_FILES = 4 << 30, 1000  # of a parcel that a driver sends
MAX_CACHE_BYTES, MAX_CACHE_FILES = 256 << 30, 20_000  # of any parcel: teacher caches may be large


def parcel(path: str | Path, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> Parcel:
    """The parcel of a file or a folder.

    Raises:
        UserError: it cannot be read, is empty or too large, or has links to folders.
    """
    root = Path(path)
    try:
        listed = [root] if root.is_file() else _files_in(root, 100 * max_files)
        sizes = [file.stat().st_size for file in listed]
        if not listed:
            raise UserError(f"{path} has no files to send: name a file of rows, or a folder with a train.jsonl.")
        if sum(sizes) > max_bytes or len(listed) > max_files:
            raise UserError(
                f"{path} has {sum(sizes):,} bytes in {len(listed):,} files, too much to send (at most "
                f"{max_bytes >> 30} GiB in {max_files:,}): copy it to a folder that all machines have."
            )
        names = [str(file.relative_to(root.parent)).replace(os.sep, "/") for file in listed]
        files = [
            StoredFile(name, file_digest(file), size) for name, file, size in zip(names, listed, sizes, strict=True)
        ]
    except OSError as error:
        raise UserError(f"{path} cannot be sent, since it cannot be read ({error.strerror or error}).") from None
    return checked_parcel(Parcel(_digest(files), root.name, files))


def _files_in(root: Path, most: int) -> list[Path]:
    listed: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        paths = [Path(folder, name) for name in names]
        linked = [path for name in folders if (path := Path(folder, name)).is_symlink()]
        if wrong := [*linked, *(path for path in paths if not path.is_file())]:
            what = "a link to a folder" if linked else "no file that can be read"
            raise UserError(f"{wrong[0]} is {what}, which is not sent: put the files themselves there, or remove it.")
        listed += paths
        if len(listed) > most:
            break
    return sorted(listed)


def _raise(error: OSError) -> None:
    raise error


def _digest(files: Sequence[StoredFile]) -> str:
    return hashlib.sha256(json.dumps([asdict(file) for file in files]).encode()).hexdigest()


def checked_parcel(parcel: Parcel) -> Parcel:
    """A parcel that may be written below a folder of its own; called by both ends.

    Raises:
        UserError: a name leads elsewhere, or a digest or a size cannot be right.
    """
    paths = [file.path for file in parcel.files]
    valid = (
        0 < len(paths) <= MAX_CACHE_FILES
        and len({path.casefold() for path in paths}) == len(paths)
        and all(_is_inside(path, parcel.name) for path in paths)
        and all(DIGEST.fullmatch(file.digest) and file.size >= 0 for file in parcel.files)
        and parcel.bytes <= MAX_CACHE_BYTES
        and parcel.digest == _digest(parcel.files)
    )
    if not valid:
        raise UserError(
            f"The data {parcel.name!a:.80} cannot be sent: file names must be plain UTF-8 text that differs by more "
            "than its case."
        )
    return parcel


def _is_inside(path: str, name: str) -> bool:
    return is_plain_path(path) and path.split("/")[0] == name


def place_parcel(stores: Sequence[Store], parcel: Parcel) -> Path:
    """The path of a parcel on this host, whose files are taken from stores if they are not here yet.

    Raises:
        DamagedCheckpoint: no store has a file. OSError: the disk refuses.
    """
    place = sent_directory() / checked_parcel(parcel).digest
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        os.utime(place)  # removed when nobody has used it for long
    else:
        with FileLock(place.with_name(f".{place.name}.lock")):  # other units of this host may need it, too
            if not place.is_dir():
                restore_files(stores, parcel.unit, parcel.files, place)
    return place / parcel.name


def send_data(
    stores: Sequence[tuple[Store, str]], tasks: Sequence[Task], lacking: Collection[str]
) -> tuple[list[Task], dict[str, Parcel]]:
    """Send data of tasks that hosts lack to all stores; returns the tasks with parcels in place of the paths.

    Raises:
        UserError: a file cannot be read, is too large, or a host has no room.
    """
    named = {str(task.options[key]) for task in tasks for key in SENDABLE if task.options.get(key)}
    parcels = {path: parcel(path) for path in sorted(named & set(lacking)) if Path(path).exists()}
    for path, one in parcels.items():
        for store, host in stores:
            try:
                store_files([store], one.unit, Path(path).parent, one.files)
            except (OSError, ConnectionError, StorageError) as error:
                raise UserError(f"{path} cannot be sent to {host} ({error}): make room there.") from None
    return with_parcels(tasks, parcels), parcels


def with_parcels(tasks: Sequence[Task], parcels: Mapping[str, Parcel]) -> list[Task]:
    """The tasks, with parcels in place of the paths of data."""
    return [
        replace(
            task,
            options={
                key: parcels[value].value if key in SENDABLE and str(value) in parcels else value
                for key, value in task.options.items()
            },
        )
        for task in tasks
    ]
