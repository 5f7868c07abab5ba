"""Space on the disks of runs: what they need is checked before the first step, and kept for their last states."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from wgpu_lora.errors import StorageError
from wgpu_lora.formats.tokenizer.tokenizer_files import tokenizer_files
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.run.run_checkpoint import RESERVE
from wgpu_lora.train.session.session import Session

FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
BLOCK = 4096  # bytes that files are rounded up to
GROWTH = 1 << 16  # bytes that the state may grow by, and of the next lines of the log
OTHER_FILES = 1 << 20  # bytes of the log, the records and the card


def reserve(session: Session, runs: Sequence[AdapterRun]) -> int:
    """Keep a file of the size of a checkpoint, and of best/, in the directory of each run, to be released when its disk
    is full.

    Returns:
        Bytes that the runs need on the disk of the first one: a checkpoint of each and their results.

    Raises:
        StorageError: a disk has less.
    """
    model = session.model
    tokenizer = sum(map(len, tokenizer_files(model.path, model.tokenizer).values())) if model.tokenizer else 0
    disks, states, sizes = [run.directory.stat().st_dev for run in runs], list[int](), Counter[int]()
    for run, disk in zip(runs, disks, strict=True):
        files, copies = run.checkpoint_files(session), 2 if run.heldout else 1  # best/ is a complete state, too
        states.append(copies * (sum(len(data) + BLOCK for data in files.values()) + GROWTH))
        models = 2 if run.args.train == "quant-scales" else 0  # in f16 and f32
        sizes[disk] += states[-1] + sum(len(files[name]) for name in run.trainable.files) + OTHER_FILES
        sizes[disk] += copies * (tokenizer + models * session.memory().groups["base"])  # of the last and the best
    whole = sizes[disks[0]]
    for run, disk, size in zip(runs, disks, states, strict=True):
        free = shutil.disk_usage(run.directory).free
        try:
            if free < sizes[disk]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with (run.directory / RESERVE).open("wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.write(bytes(size))
        except OSError as error:
            if error.errno in FULL:  # or a quota, which the free space does not tell
                raise StorageError(
                    f"The disk of {run.directory} has {free:,} bytes free, but a checkpoint and the results of the run "
                    f"need {sizes[disk]:,} ({error.strerror}): make room there, or choose another {flag('output')}."
                ) from None
        sizes[disk] -= size
    return whole


def release(runs: Sequence[AdapterRun]) -> bool:
    """Remove the reserves; returns whether there was one."""
    result = [run.directory / RESERVE for run in runs if (run.directory / RESERVE).exists()]
    for path in result:
        with suppress(OSError):  # which would hide the error that this is called for
            path.unlink()
    return bool(result)
