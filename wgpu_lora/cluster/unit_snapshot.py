"""A consistent copy of a unit's directory, taken beside a trainer that goes on writing.

Checkpoints never change once they have their names: trainers write each beside, and rename it. So a snapshot links
their files, and then checks each by its manifest. What moved on meanwhile is left for the next checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from wgpu_lora.atomic import file_digest
from wgpu_lora.cluster.cluster_paths import ADAPTERS, PIPELINE
from wgpu_lora.cluster.messages import StoredFile
from wgpu_lora.errors import UserError
from wgpu_lora.json_files import parse_object
from wgpu_lora.train.finetune import LOCK
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.pipeline_state import read_pipeline_state
from wgpu_lora.train.run.run_checkpoint import MANIFEST
from wgpu_lora.train.run.run_state import STATE, read_state

KEPT = 2  # checkpoints of a run that goes on: a ruined adapter falls back to the one before the newest
TEMPORARY = re.compile(r"\..*\.(tmp|previous|old)")
Known = dict[tuple[int, int, int, int], str]  # digests by device, inode, time and size


class ChangedMeanwhile(Exception):
    """The trainer has replaced files meanwhile: try again at the next checkpoint."""


class Snapshots:
    """Takes snapshots of one directory; digests of files that have not changed since are not computed again."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._known: Known = {}

    def take(self, target: Path, ended: bool = False) -> tuple[list[StoredFile], dict[str, int]]:
        """Copy the unit's files into a new directory; returns their list and, by task, the step to resume from.

        ended: the trainer has, by itself or not: what a crash left is put in order, and all files are copied, not only
            those that a resumed run needs.

        Raises:
            ChangedMeanwhile: the trainer has replaced files meanwhile. OSError: the disk refuses.
        """
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        try:
            for root in self._roots() if ended else ():
                run_checkpoint.sweep_run(root)
            before = self._pipeline_state()
            for path in self._files(ended):
                self._copy(path, target / path.relative_to(self.directory))
            if self._pipeline_state() != before:
                raise ChangedMeanwhile
            steps = self._check(target)
            found = [self._stored(path, target) for path in sorted(target.rglob("*")) if path.is_file()]
        except FileNotFoundError as error:
            raise ChangedMeanwhile from error
        return found, steps

    def _pipeline_state(self) -> bytes | None:
        path = self.directory / PIPELINE / STATE
        return path.read_bytes() if path.is_file() else None

    def _roots(self) -> list[Path]:
        adapters = self.directory / ADAPTERS
        return [self.directory / PIPELINE, *(sorted(adapters.iterdir()) if adapters.is_dir() else ())]

    def _files(self, ended: bool) -> Iterator[Path]:
        for root in self._roots():
            old = (
                []
                if ended
                else [place for _, place in run_checkpoint.list_checkpoints(root / run_checkpoint.STEPS)[:-KEPT]]
            )
            for path in walked(root):
                if not any(place in path.parents for place in old):
                    yield path

    def _copy(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".safetensors" or (source.parent / MANIFEST).is_file():
            link_or_copy(source, target)  # never written in place
        else:
            shutil.copyfile(source, target)

    # -- checks ----------------------------------------------------------------------------------------------------

    def _check(self, target: Path) -> dict[str, int]:
        """Check all checkpoints of a snapshot; returns the steps of the newest ones by task."""
        steps = {}
        for run in sorted((target / ADAPTERS).iterdir()) if (target / ADAPTERS).is_dir() else ():
            places = [
                p for _, p in run_checkpoint.list_checkpoints(run / run_checkpoint.STEPS)
            ] + run_checkpoint.results_of(run)
            for place in places:
                self._check_checkpoint(place)
            if newest := run_checkpoint.latest_checkpoint(run):
                steps[run.name] = read_state(newest)[0].step
        if (target / PIPELINE / STATE).is_file():
            steps |= self._check_pipeline(target)
        return steps

    def _check_checkpoint(self, place: Path) -> None:
        """Check a checkpoint by its manifest, whose digests are remembered for the list of files."""
        if any(self._key(path) not in self._known for path in place.iterdir()):
            try:
                if wrong := run_checkpoint.checkpoint_damage(place):
                    raise ChangedMeanwhile(f"{place.name}: {wrong}")
            except UserError as error:
                raise ChangedMeanwhile(str(error)) from error
            for name, digest in parse_object((place / MANIFEST).read_bytes(), MANIFEST)["sha256"].items():
                self._known[self._key(place / name)] = digest

    def _check_pipeline(self, target: Path) -> dict[str, int]:
        """The steps in a pipeline's state, of which each slot must have the checkpoint, be it not named `last` yet."""
        try:
            state = read_pipeline_state(target / PIPELINE)
        except UserError as error:
            raise ChangedMeanwhile(str(error)) from error
        for name, step in state.steps.items():
            run = target / ADAPTERS / name
            if not any(_is_at(run / place, step) for place in (run_checkpoint.LAST, run_checkpoint.NEXT)):
                raise ChangedMeanwhile(f"{name} has no checkpoint of step {step}")
        return state.steps

    # -- digests ---------------------------------------------------------------------------------------------------

    def _stored(self, path: Path, target: Path) -> StoredFile:
        key = self._key(path)
        digest = self._known.get(key) or file_digest(path)
        self._known[key] = digest
        return StoredFile(path.relative_to(target).as_posix(), digest, key[3])

    def _key(self, path: Path) -> tuple[int, int, int, int]:
        said = path.stat()
        return said.st_dev, said.st_ino, said.st_mtime_ns, said.st_size


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file another name on the same disk, or copy it. Raises OSError."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)


def walked(root: Path) -> Iterator[Path]:
    """The files below a directory but temporary ones and locks; links are left out."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.is_symlink() or path.name == LOCK or TEMPORARY.fullmatch(path.name):
            continue
        if path.is_dir():
            yield from walked(path)
        elif path.is_file():
            yield path


def _is_at(place: Path, step: int) -> bool:
    return place.is_dir() and not run_checkpoint.checkpoint_damage(place) and read_state(place)[0].step == step
