"""The files of a unit's directory that are stored as a checkpoint.

They are listed in the thread that trains, between two steps. Trainers write checkpoints beside, and rename them, so
that a run goes on from its directory as it is at any moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from wgpu_lora.cluster.cluster_paths import ADAPTERS, MULTI_ADAPTER
from wgpu_lora.cluster.messages import StoredFile
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.train.job import LOCK
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.multi_adapter_state import read_multi_adapter_state
from wgpu_lora.train.run.run_state import STATE, read_state

KEPT = 2  # checkpoints of a run that goes on: a ruined adapter falls back to the one before the newest
TEMPORARY = re.compile(r"\..*\.(tmp|previous|old)")


class UnitFiles:
    """The files of a unit's directory; digests of those that have not changed are not computed again."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._digests: dict[tuple[int, int, int], str] = {}  # by inode, time and size

    def files(self, ended: bool = False) -> list[StoredFile]:
        """Those that a resumed run needs; of a run that has ended, all. Raises OSError."""
        files = []
        for root in self._roots():
            checkpoints = [] if ended else run_checkpoint.list_checkpoints(root / run_checkpoint.STEPS)
            old = {path for _, path in checkpoints[:-KEPT]}
            files += [self._stored_file(path) for path in _files_below(root) if old.isdisjoint(path.parents)]
        return files

    def steps(self) -> dict[str, int]:
        """The step that each task would be resumed from. Raises UserError if a checkpoint is damaged."""
        if (self.directory / MULTI_ADAPTER / STATE).is_file():
            return read_multi_adapter_state(self.directory / MULTI_ADAPTER).steps
        newest = {root.name: run_checkpoint.latest_checkpoint(root) for root in self._roots()[1:]}
        return {name: read_state(path)[0].step for name, path in newest.items() if path}

    def remove_leftovers(self) -> None:
        """Put in order what a run that has ended left unfinished."""
        for root in self._roots():
            run_checkpoint.remove_run_leftovers(root)

    def _roots(self) -> list[Path]:
        adapters = self.directory / ADAPTERS
        return [self.directory / MULTI_ADAPTER, *(sorted(adapters.iterdir()) if adapters.is_dir() else ())]

    def _stored_file(self, path: Path) -> StoredFile:
        stat = path.stat()
        key = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if key not in self._digests:
            self._digests[key] = file_digest(path)
        return StoredFile(path.relative_to(self.directory).as_posix(), self._digests[key], stat.st_size)


def _files_below(root: Path) -> Iterator[Path]:
    """The files below a directory but temporary ones and locks; links are left out."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.is_symlink() or path.name == LOCK or TEMPORARY.fullmatch(path.name):
            continue
        if path.is_dir():
            yield from _files_below(path)
        elif path.is_file():
            yield path
