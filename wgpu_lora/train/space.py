"""Space on the disks of runs: what they need is checked before the first step, and kept for their last states."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from wgpu_lora.data.tokenizer_files import tokenizer_files
from wgpu_lora.errors import StorageError
from wgpu_lora.names.naming import flag
from wgpu_lora.train.checkpoint import RESERVE
from wgpu_lora.train.session import Session
from wgpu_lora.train.slot import AdapterRun

FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
BESIDE = 1 << 20  # bytes of the log, the records and the card


def reserve(session: Session, runs: Sequence[AdapterRun]) -> int:
    """Keep a file of a checkpoint's size in the directory of each run, to be released when its disk is full.

    Returns:
        Bytes that the runs need on the disk of the first one: a checkpoint of each and their results.

    Raises:
        StorageError: a disk has less.
    """
    model = session.model
    tokenizer = sum(map(len, tokenizer_files(model.path, model.tokenizer).values())) if model.tokenizer else 0
    states, needed = [], Counter[int]()
    for run in runs:
        files = run.checkpoint_files(session)
        states.append(sum(map(len, files.values())))
        results = sum(len(files[name]) for name in run.subject.files) + tokenizer + BESIDE
        if run.heldout:
            results += states[-1] + tokenizer  # best/
        if run.args.train == "quant-scales":  # the model in f16 and f32, of the last step and of the best one
            results += 2 * session.memory().groups["base"] * (2 if run.heldout else 1)
        needed[_disk(run.directory)] += states[-1] + results
    for run in runs:
        _check(run.directory, needed[_disk(run.directory)])
    for run, size in zip(runs, states, strict=True):
        try:
            _fill(run.directory / RESERVE, size)
        except OSError as error:
            release(runs)
            if error.errno in FULL:  # by a quota, which the free space does not tell
                _check(run.directory, needed[_disk(run.directory)], str(error.strerror))
    return needed[_disk(runs[0].directory)]


def release(runs: Sequence[AdapterRun]) -> bool:
    """Remove the reserves; returns whether there was one."""
    found = False
    for run in runs:
        with suppress(FileNotFoundError):
            (run.directory / RESERVE).unlink()
            found = True
    return found


def _disk(directory: Path) -> int:
    return directory.stat().st_dev


def _check(directory: Path, needed: int, refused: str = "") -> None:
    free = shutil.disk_usage(directory).free
    if refused or free < needed:
        why = f", and it cannot be reserved ({refused})" if refused else ""
        raise StorageError(
            f"The disk of {directory} has {free:,} bytes free{why}, but a checkpoint and the results of the run need "
            f"{needed:,}: make room there, or choose another {flag('output')}."
        )


def _fill(path: Path, size: int) -> None:
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.write(bytes(size))
