"""Directories of results: checked before anything runs, since they are written hours later, and filled at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from filelock import Timeout

from wgpu_lora.atomic import file_digest, replace_directory
from wgpu_lora.cluster.checkpoint_store import DamagedCheckpoint, Store, restore_files
from wgpu_lora.cluster.messages import StoredFile, Task
from wgpu_lora.errors import UserError, reason
from wgpu_lora.locks import lock_file
from wgpu_lora.text import join_words
from wgpu_lora.train.run.pipeline_state import MEMBER

LOCK, PROBE = ".lock", ".test"  # of the same length
MOST = 3  # files that a sentence names


def output_of(text: str, shared: str | None) -> str:
    """The absolute path of an output directory; a relative one is in the shared folder, else in the working directory.

    Raises:
        UserError: it is outside of the shared folder.
    """
    if shared is None:
        return os.path.abspath(os.path.expanduser(text))
    found = os.path.normpath(os.path.join(shared, text))
    if found == os.path.normpath(shared) or not Path(found).is_relative_to(os.path.normpath(shared)):
        raise UserError(
            f"The output directory {text} is not inside the shared folder {shared}: give a path in it, or leave the "
            "shared folder out."
        )
    return found


def check_outputs(tasks: Sequence[Task]) -> None:
    """Whether every task has a directory of its own that can be made and holds nothing yet, on this machine.

    Raises:
        UserError: two tasks have the same directory, or one in another's, or it is not empty or cannot be made.
    """
    check_apart(tasks)
    for task in tasks:
        _check_free(task)


def check_apart(tasks: Sequence[Task]) -> None:
    """Whether every task has a directory of its own.

    Directories are compared as the file system resolves them, links and `..` included, and without their case, since
    results may be copied to where it does not count.

    Raises:
        UserError: two tasks have the same directory, or one in another's.
    """
    owners: dict[Path, Task] = {}
    for task in tasks:
        place = _place(task)
        if place in owners:
            raise UserError(
                f"{task.output} is the output directory of {owners[place].name} and {task.name}: give each its own."
            )
        owners[place] = task
    for place, task in owners.items():
        around = next((parent for parent in place.parents if parent in owners), None)
        if around:
            other = owners[around]
            raise UserError(
                f"{task.output}, the output directory of {task.name}, is inside that of {other.name}, {other.output}: "
                "put them side by side."
            )


def _place(task: Task) -> Path:
    return Path(os.path.realpath(task.output).casefold())  # pathlib raises for links in a circle


def fetching(output: Path) -> Path:
    """The hidden directory beside an output in which its results are gathered."""
    return output.with_name(f".{output.name}.fetching")


def fetching_lock(output: Path) -> Path:
    """What says that a program gathers them; no other hidden name beside an output is longer."""
    return output.with_name(f".{output.name}.fetching{LOCK}")


def _check_free(task: Task) -> None:
    path = Path(task.output)
    existing = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not existing.is_dir() or path.is_symlink():
        what = "is not a directory" if not existing.is_dir() else "is a link, which is not replaced"
        raise UserError(f"{existing} {what}, so {task.name} cannot be written to {path}: choose another.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{existing} is not writable, so {task.name} cannot be written to {path}: choose another.")
    try:
        held = sorted(os.listdir(path))[:MOST] if existing == path else []
        if not held:
            _try(path)
    except OSError as error:
        raise UserError(
            f"The output directory {path} of {task.name} cannot be made ({reason(error)}): choose another."
        ) from None
    if held:
        raise UserError(
            f"The output directory {path} of {task.name} is not empty (it has {join_words(held)}): choose another "
            "directory, or move it away."
        )


def _try(output: Path) -> None:
    """Make the folders of an output, and a directory with the longest name that is needed in them; nothing is left.

    Raises:
        OSError: that cannot be done.
    """
    probe = fetching_lock(output).name.removesuffix(LOCK) + PROBE
    made: list[Path] = []
    try:
        for folder in (*reversed(output.parents), output.with_name(probe)):
            try:
                folder.mkdir()
                made.append(folder)
            except OSError:  # on a read-only file system also where it exists
                if not folder.is_dir():
                    raise
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # another program has begun to use it
                folder.rmdir()


def fetch(stores: Sequence[Store], unit: str, task: str, files: Sequence[StoredFile], output: Path) -> bool:
    """Bring a result to a directory of this machine; False if another program is doing it.

    Raises:
        UserError: the directory holds something else or cannot be written, or the result is incomplete.
        ClusterGone: the cluster does not answer.
    """
    # The record of a pipeline is not fetched with one adapter, which is a run that can be extended by itself.
    files = [file for file in files if file.path != MEMBER]
    if _is_here(files, output):
        return True
    if output.is_symlink() or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        raise UserError(f"{output} holds something else than the result of {task}: move it away, and attach again.")
    hidden = fetching(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(fetching_lock(output)):
            if _is_here(files, output):  # another program was faster
                return True
            restore_files(stores, unit, files, hidden)
            with suppress(OSError):
                output.rmdir()  # an empty one
            replace_directory(hidden, output)
            with suppress(OSError):  # on Windows, while it is held
                fetching_lock(output).unlink()
    except Timeout:
        return False
    except ConnectionError as error:
        raise UserError(f"The result of {task} cannot be fetched now ({error}): attach again.") from None
    except DamagedCheckpoint as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise UserError(f"The result of {task} came incompletely from the cluster ({error}): attach again.") from None
    except OSError as error:
        raise UserError(
            f"The result of {task} cannot be written to {output} ({reason(error)}): mend that, and attach again."
        ) from None
    return True


def _is_here(files: Sequence[StoredFile], directory: Path) -> bool:
    """Whether a directory is a result: all of its files, with their digests; others may be beside them."""
    if directory.is_symlink() or not directory.is_dir() or not files:
        return False
    paths = [(directory / file.path, file) for file in files]
    return all(path.is_file() and path.stat().st_size == file.size for path, file in paths) and all(
        file_digest(path) == file.digest for path, file in paths
    )
