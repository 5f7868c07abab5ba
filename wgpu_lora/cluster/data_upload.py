"""Files that hosts lack, by content: data that only the driver's machine has (`--send-data`), and teacher caches."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from filelock import FileLock

from wgpu_lora.cluster.checkpoint_store import Store, is_plain_path, restore_files, store_files
from wgpu_lora.cluster.cluster_paths import SENDABLE, checked_part, sent_directory
from wgpu_lora.cluster.messages import Parcel, StoredFile, Task
from wgpu_lora.errors import StorageError, UserError, reason
from wgpu_lora.files.atomic import file_digest

MAX_BYTES, MAX_FILES = 4 << 30, 1000  # of a parcel that a driver sends
MAX_CACHE_BYTES, MAX_CACHE_FILES = 256 << 30, 20_000  # of any parcel: teacher caches may be large


def parcel(path: str | Path, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> Parcel:
    """The parcel of a file or a folder.

    Raises:
        UserError: it cannot be read, is empty or too large, has links to folders, or names that are not plain.
    """
    root = Path(path)
    try:
        paths = [root] if root.is_file() else _files_in(root)
        sizes = [file.stat().st_size for file in paths]
        if not paths:
            raise UserError(f"{path} has no files to send: name a file of rows, or a folder with a train.jsonl.")
        if sum(sizes) > max_bytes or len(paths) > max_files:
            raise UserError(
                f"{path} has {sum(sizes):,} bytes in {len(paths):,} files, too much to send (at most "
                f"{max_bytes >> 30} GiB in {max_files:,}): copy it to a folder that all machines have."
            )
        names = [file.relative_to(root.parent).as_posix() for file in paths]
        if not all(map(is_plain_path, names)) or len({name.casefold() for name in names}) < len(names):
            raise UserError(
                f"{path} cannot be sent: names of files must be plain UTF-8 text that differs by more than its case."
            )
        files = [
            StoredFile(name, file_digest(file), size) for name, file, size in zip(names, paths, sizes, strict=True)
        ]
    except OSError as error:
        raise UserError(f"{path} cannot be sent, since it cannot be read ({reason(error)}).") from None
    digest = hashlib.sha256(json.dumps([asdict(file) for file in files]).encode()).hexdigest()
    return Parcel(digest, root.name, files)


def _files_in(root: Path) -> list[Path]:
    paths: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        for name in (*folders, *names):
            path = Path(folder, name)
            if path.is_symlink() and path.is_dir():
                raise UserError(f"{path} is a link to a folder, which is not sent: put the files themselves there.")
            if name in names and not path.is_file():
                raise UserError(f"{path} is no file that can be read, which is not sent: remove it.")
        paths += [Path(folder, name) for name in names]
    return sorted(paths)


def _raise(error: OSError) -> None:
    raise error


def place_parcel(stores: Sequence[Store], parcel: Parcel) -> Path:
    """The path of a parcel on this host, whose files are taken from stores if they are not here yet.

    Raises:
        DamagedCheckpoint: no store has a file. OSError: the disk refuses.
    """
    directory = sent_directory() / checked_part(parcel.digest)
    directory.parent.mkdir(parents=True, exist_ok=True)
    if directory.is_dir():
        os.utime(directory)  # removed when nobody has used it for long
    else:
        with FileLock(directory.with_name(f".{directory.name}.lock")):  # other units of this host may need it, too
            if not directory.is_dir():
                restore_files(stores, parcel.unit, parcel.files, directory)
    return directory / parcel.name


def send_data(
    stores: Sequence[tuple[Store, str]], tasks: Sequence[Task], missing_paths: Collection[str]
) -> tuple[list[Task], dict[str, Parcel]]:
    """Send data of tasks that hosts lack to all stores; returns the tasks with parcels in place of the paths.

    Raises:
        UserError: a file cannot be read, is too large, or a host has no room.
    """
    data = {str(task.options[key]) for task in tasks for key in SENDABLE if task.options.get(key)}
    parcels = {path: parcel(path) for path in sorted(data & set(missing_paths)) if Path(path).exists()}
    for path, entry in parcels.items():
        for store, host in stores:
            try:
                store_files([store], entry.unit, Path(path).parent, entry.files)
            except (OSError, ConnectionError, StorageError) as error:
                raise UserError(f"{path} cannot be sent to {host} ({error}): make room there.") from None
    values = {path: entry.value for path, entry in parcels.items()}
    return [
        replace(task, options={k: values.get(v, v) if k in SENDABLE else v for k, v in task.options.items()})
        for task in tasks
    ], parcels
