"""Directories of results: checked before anything runs, since they are written hours later, and filled at the end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from wgpu_lora.cluster.checkpoint_store import DamagedCheckpoint, Store, restore_files
from wgpu_lora.cluster.messages import StoredFile, Task
from wgpu_lora.errors import UserError, reason
from wgpu_lora.files.atomic import check_new, file_digest, new_directory
from wgpu_lora.files.locks import OutputInUse, locked
from wgpu_lora.train.adapter_tasks import check_distinct_directories
from wgpu_lora.train.run.multi_adapter_state import MEMBER

OPTION = "--output"  # in messages


def output_of(text: str, shared: str | None) -> str:
    """The absolute path of an output directory; a relative one is in the shared folder, else in the working directory.

    Raises:
        UserError: it is outside of the shared folder.
    """
    if shared is None:
        return os.path.abspath(os.path.expanduser(text))
    path = os.path.normpath(os.path.join(shared, text))
    if path == os.path.normpath(shared) or not Path(path).is_relative_to(os.path.normpath(shared)):
        raise UserError(
            f"The output directory {text} is not inside the shared folder {shared}: give a path in it, or leave the "
            "shared folder out."
        )
    return path


def check_outputs(tasks: Sequence[Task], *, local: bool = True) -> None:
    """Whether every task has a directory of its own, which can be made and holds nothing yet if it is of this machine.

    Raises:
        UserError: two tasks have the same directory, or one in another's, or it is not empty or cannot be made.
    """
    # Results may be copied to where the case of names does not count.
    check_distinct_directories([(task.name, task.output) for task in tasks], ignore_case=True)
    # Whether a directory can be made is tried once in each folder, with the longest name.
    by_length = sorted(tasks, key=lambda task: len(os.fsencode(task.output)))
    longest = {os.path.dirname(task.output): task for task in by_length}
    for task in tasks if local else ():
        try:
            check_new(task.output, OPTION, directory=True)
            if longest[os.path.dirname(task.output)] is task:
                with suppress(_Abandoned), new_directory(task.output, OPTION):
                    raise _Abandoned
        except UserError as error:
            raise UserError(f"{task.name}: {error}") from None


class _Abandoned(Exception):
    """Leaves the block of a new directory, so that nothing of it stays."""


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
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(output, OPTION))
            except OutputInUse:
                return False
            except UserError as error:
                why = error.problem
                raise UserError(
                    f"The result of {task} cannot be written to {output} ({why}): mend that, and attach again."
                ) from None
            if not _is_here(files, output):  # another program may have been faster
                restore_files(stores, unit, files, stack.enter_context(new_directory(output)))
    except ConnectionError as error:
        raise UserError(f"The result of {task} cannot be fetched now ({error}): attach again.") from None
    except DamagedCheckpoint as error:
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
