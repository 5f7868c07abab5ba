"""Where results go: checked before anything runs, since they are written hours later."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from wgpu_lora.cluster.facts import Task
from wgpu_lora.errors import UserError


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
    """Whether every task has a directory of its own that can be written and holds nothing yet, on this machine.

    Raises:
        UserError: two tasks have the same directory, or one in another's, or it is in use or cannot be written.
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


def _check_free(task: Task) -> None:
    from wgpu_lora.train.resume import refuse_used  # imports wgpu, which --help does not need

    path = Path(task.output)
    existing = next(one for one in (path, *path.parents) if one.exists() or one.is_symlink())
    if not existing.is_dir():
        raise UserError(f"{existing} is not a directory, so {task.name} cannot be written to {path}: choose another.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{existing} is not writable, so {task.name} cannot be written to {path}: choose another.")
    try:
        refuse_used(path)
    except UserError:
        raise UserError(
            f"The output directory {path} of {task.name} already holds a run or an adapter: choose another "
            "directory, or move it away."
        ) from None
