"""Results in a shared folder, and files that drivers send: paths that another machine names are checked here."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from wgpu_lora.cluster.node.listing import Listing, results_of
from wgpu_lora.cluster.node.shelf import Shelf
from wgpu_lora.cluster.node.transfer import fetch, same_files
from wgpu_lora.errors import UserError
from wgpu_lora.paths import is_path

_LOCKS: dict[str, threading.Lock] = {}  # by directory that is published to
_LOCKS_LOCK = threading.Lock()
ROOTS = "WGPU_LORA_CLUSTER_ROOTS"  # directories that jobs may read and publish to, separated as in PATH


def allowed_roots() -> list[Path]:
    """The directories that jobs of a cluster are confined to on this host; none: all that the user may read."""
    return [Path(text).resolve() for text in os.environ.get(ROOTS, "").split(os.pathsep) if text.strip()]


def refused_path(text: str, roots: Sequence[Path]) -> str | None:
    """Why a path may not be used on this host, as part of a sentence; None if it may be."""
    if not is_path(text) or not os.path.isabs(text):
        return "is not an absolute path"
    real = Path(os.path.realpath(text))
    if roots and not any(real.is_relative_to(root) for root in roots):
        return f"is outside {', '.join(map(str, roots))}, which {ROOTS} allows"
    return None


def unreadable(path: str, roots: Sequence[Path]) -> str | None:
    """Why a path cannot be read on this host, as part of a sentence; None if it can be."""
    if wrong := refused_path(path, roots):
        return wrong
    if not os.path.exists(path):
        return "does not exist"
    return None if os.access(path, os.R_OK) else "cannot be read"


def publish(shelf: Shelf, unit: str, digest: str, task: str, target: str, shared: str = "/") -> Listing:
    """Write a task's result from a copy in this host's shelf to a directory in a shared folder; returns its files.

    It is complete, or not there. One that is there already with the same files stays as it is.

    Raises:
        UserError: the shared folder or the copy is not there, or the path may not be used, has other files, or cannot
            be written.
    """
    if wrong := refused_path(target, allowed_roots()):
        raise UserError(f"The result of {task} cannot be written: {target} {wrong}; choose another output.")
    if not Path(shared).is_dir():
        raise UserError(f"The result of {task} cannot be written: this host has no shared folder {shared}; mount it.")
    place = Path(target)
    whole = shelf.files(unit, digest)
    files = results_of(whole, task)
    if not files:
        raise UserError(f"The copy of {unit} has no files of {task}: look at why it ended.")
    blobs = {file.path: shelf.path(unit, digest, f"adapters/{task}/{file.path}") for file in files}
    with _lock(target):  # a coordinator that was killed may have asked already
        if not same_files(place, files):
            fetch(files, place, lambda file, offset: b"", find=lambda file: blobs[file.path])
    return files


def _lock(target: str) -> threading.Lock:
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(os.path.realpath(target), threading.Lock())
