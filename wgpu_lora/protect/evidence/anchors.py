"""How far each run's evidence log had come, kept in the user's data directory, away from the run's own.

A run's directory may be put back as a whole, log included, to an earlier state: what is in it cannot tell. The anchor
on the machine that trained can, and so can the broker's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import Timeout

from wgpu_lora.errors import UserError, reason
from wgpu_lora.files.atomic import sha256, write_bytes_atomic
from wgpu_lora.files.json_files import read_json, to_json
from wgpu_lora.files.locks import lock_file
from wgpu_lora.files.typed_json import typed
from wgpu_lora.train.track.run_log import LOCK_SECONDS, data_directory

NAME = "anchors"
MAX_BYTES = 4096


@dataclass(frozen=True)
class Anchor:
    """The last line of a run's log that this machine wrote: its number, and its SHA-256."""

    run: str
    sequence: int
    head: str


def find(run: str) -> Anchor | None:
    """The anchor of a run; None if this machine has none. Raises UserError if it cannot be read."""
    path = _path(run)
    if not path.exists():
        return None
    try:
        anchor: Anchor = typed(Anchor, read_json(path, MAX_BYTES))
        if anchor.run != run:
            raise ValueError(f"it belongs to the run {anchor.run!a:.80}")
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): restore it, or remove it to go on without an anchor.") from None
    return anchor


def remember(run: str, sequence: int, head: str) -> None:
    """Record that a run's log has come to a line. Raises UserError if it had come further, or it cannot be written."""
    with _locked():
        anchor = find(run)
        if anchor and (anchor.sequence > sequence or (anchor.sequence == sequence and anchor.head != head)):
            raise _rollback_error(anchor, sequence)
        write_bytes_atomic(_path(run), to_json(asdict(Anchor(run, sequence, head))).encode())


def prepare() -> None:
    """Make the directory of anchors, before a run needs it. Raises UserError if it cannot be written."""
    with _locked():
        pass


@contextmanager
def _locked() -> Iterator[None]:
    """Keep other processes out of the anchors. Raises UserError if they cannot be written."""
    directory = data_directory() / NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock_file(directory / ".lock", LOCK_SECONDS):
            yield
    except (OSError, Timeout) as error:
        raise UserError(
            f"The anchors in {directory} cannot be written ({reason(error)}): make room or give write permission, or "
            "set WGPU_LORA_DATA_DIR to another directory."
        ) from None


def check(run: str, heads: Sequence[str]) -> bool:
    """Whether this machine has an anchor of a run, which is then found in its log.

    Args:
        heads: SHA-256 of all lines of the log.

    Raises:
        UserError: the log is an older state of the run's, or another one.
    """
    anchor = find(run)
    if anchor and (anchor.sequence >= len(heads) or heads[anchor.sequence] != anchor.head):
        raise _rollback_error(anchor, len(heads) - 1)
    return anchor is not None


def _rollback_error(anchor: Anchor, sequence: int) -> UserError:
    problem = f"has another line {anchor.sequence + 1} than this machine wrote"
    if sequence < anchor.sequence:
        problem = f"ends at line {sequence + 1}, but had come to line {anchor.sequence + 1} on this machine"
    return UserError(
        f"The evidence log of the run {anchor.run!a:.80} {problem}, so that its directory is an older state or a copy "
        "of it: restore the newest one."
    )


def _path(run: str) -> Path:
    return data_directory() / NAME / f"{sha256(run.encode())[:32]}.json"
