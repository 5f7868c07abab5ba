"""Results brought to this machine, piece by piece: a directory has its name only when all of it is there and right."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import Timeout

from wgpu_lora.atomic import file_digest, replace_directory
from wgpu_lora.cluster.client.asking import Asking
from wgpu_lora.cluster.client.bridge import ClusterGone
from wgpu_lora.cluster.client.logged import log_place
from wgpu_lora.cluster.facts import from_plain
from wgpu_lora.cluster.node.listing import FileFacts, checked_listing
from wgpu_lora.cluster.node.shelf import PIECE
from wgpu_lora.cluster.spec.outputs import fetching, fetching_lock
from wgpu_lora.errors import UserError, reason
from wgpu_lora.locks import lock_file


@dataclass(frozen=True)
class Result:
    """What a task has left, in the shelf of a host (Ray's id of the node). digest: of the unit's copy."""

    task: str
    unit: str
    digest: str
    host: str
    files: list[FileFacts]


def result_of(value: Any) -> Result:
    """A result as the coordinator says it.

    Raises:
        UserError: a path leads out of the directory, or a digest or a size is not allowed.
    """
    found = from_plain(Result, value)
    checked_listing(value["files"])
    return found


def fetch(
    cluster: Asking, result: Result, output: str, tell: Callable[[int, int], None] = lambda done, total: None
) -> bool:
    """Bring a result to a directory of this machine; False if another program is doing it.

    An interrupted one goes on where it was: files in the hidden directory whose digests are right are kept.

    Args:
        tell: called with the bytes that are there and those of all files.

    Raises:
        UserError: the directory holds something else, or cannot be written, or what came is not what was promised.
        ClusterGone: the cluster does not answer.
    """
    final = Path(output)
    if same(result, final):
        return True
    if final.is_symlink() or (final.exists() and (not final.is_dir() or any(final.iterdir()))):
        raise UserError(
            f"{final} holds something else than the result of {result.task}: move it away, and attach again."
        )
    hidden = fetching(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(fetching_lock(final)):
            if same(result, final):  # another program was faster
                return True
            hidden.mkdir(exist_ok=True)
            _fill(cluster, result, hidden, tell)
            with suppress(OSError):
                final.rmdir()  # an empty one
            replace_directory(hidden, final)
            with suppress(OSError):  # on Windows, while it is held
                fetching_lock(final).unlink()
    except Timeout:
        return False
    except OSError as error:
        raise UserError(
            f"The result of {result.task} cannot be written to {final} ({reason(error)}): mend that, and attach again."
        ) from None
    return True


def same(result: Result, directory: Path) -> bool:
    """Whether a directory is this result: all of its files, with their digests; others may be beside them."""
    if directory.is_symlink() or not directory.is_dir() or not result.files:
        return False
    return all(_right(directory / file.path, file) for file in result.files)


def _right(path: Path, file: FileFacts) -> bool:
    try:
        return (
            path.is_file()
            and not path.is_symlink()
            and path.stat().st_size == file.size
            and (file_digest(path) == file.digest)
        )
    except OSError:
        return False


def _fill(cluster: Asking, result: Result, place: Path, tell: Callable[[int, int], None]) -> None:
    _remove_others(result, place)
    total, done = sum(file.size for file in result.files), 0
    for file in result.files:
        path = place / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _right(path, file):
            _bring(cluster, result, file, path, partial(_more, tell, done, total))
        done += file.size
        tell(done, total)


def _more(tell: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    tell(before + done, total)


def _bring(cluster: Asking, result: Result, file: FileFacts, path: Path, tell: Callable[[int], None]) -> None:
    """One file, checked while it comes."""
    digest, at = hashlib.sha256(), 0
    temporary = path.with_name(f".{path.name[:200]}.part")
    with temporary.open("wb") as out:
        while at < file.size:
            size = min(PIECE, file.size - at)
            name = f"adapters/{result.task}/{file.path}"
            data = cluster.call(f"host:{result.host}", "read", result.unit, result.digest, name, at, size)
            if not isinstance(data, bytes) or len(data) != size:
                raise UserError(f"{file.path} of {result.task} came incompletely from the cluster: attach again.")
            digest.update(data)
            out.write(data)
            at += size
            tell(at)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != file.digest:
        temporary.unlink()
        raise UserError(
            f"{file.path} of {result.task} came with another digest than the cluster promised: attach again."
        )
    temporary.replace(path)


def _remove_others(result: Result, place: Path) -> None:
    """Remove what an earlier attempt has left that is no part of this result."""
    files = {file.path for file in result.files}
    folders = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    for path in sorted(place.rglob("*"), reverse=True):
        name = path.relative_to(place).as_posix()
        if path.is_dir() and not path.is_symlink():
            if name not in folders:
                shutil.rmtree(path)
        elif name not in files or path.is_symlink():
            path.unlink()


@dataclass
class Fetched:
    """done: tasks whose results are here now. wrong: why a result could not be written, by task."""

    done: set[str] = field(default_factory=set)
    wrong: dict[str, str] = field(default_factory=dict)


def fetch_ended(
    cluster: Asking,
    run: str,
    outputs: Mapping[str, str],
    tell: Callable[[str, int, int], None] = lambda task, done, total: None,
) -> Fetched:
    """Fetch all tasks of a run that have ended and are not fetched; the coordinator is told.

    Args:
        outputs: directories of this machine, by task. tell: called with the task and bytes.

    Raises:
        ClusterGone: the cluster does not answer.
    """
    found = Fetched()
    for value in cluster.coordinator("results", run):
        try:
            result = result_of(value)
            task = result.task
            if task in outputs and fetch(cluster, result, outputs[task], partial(tell, task)):
                cluster.coordinator("fetched", run, task)
                log_place(Path(outputs[task]))
                found.done.add(task)
        except ClusterGone:
            raise
        except UserError as error:
            found.wrong[str(value.get("task"))] = str(error)
    return found
