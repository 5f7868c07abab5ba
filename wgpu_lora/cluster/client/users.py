"""The programs that use the local Ray: it is ended by the last one to leave, when nothing is left to do there."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from wgpu_lora.cluster.client import local
from wgpu_lora.process_identity import process_start

_NUMBERS = itertools.count()


@contextmanager
def using() -> Iterator[None]:
    """Count this program among those that use the local Ray, also before it runs. Raises UserError."""
    with local.locked() as directory:
        mine = _users(directory) / f"{os.getpid()}-{process_start(os.getpid())}-{next(_NUMBERS)}"
        mine.parent.mkdir(exist_ok=True)
        mine.touch()
    try:
        yield
    finally:
        mine.unlink(missing_ok=True)


def end_unused(over: Callable[[], bool]) -> None:
    """End the local Ray if no other program uses it, and `over`, asked while none can begin to, says so.

    Raises:
        UserError: the state directory cannot be used.
    """
    local.end_local(lambda: not _others(local.state_directory()) and over())


def _others(directory: Path) -> bool:
    """Whether another program uses it; what killed ones have left is removed."""
    found = False
    for file in _users(directory).iterdir() if _users(directory).is_dir() else ():
        pid, _, rest = file.name.partition("-")
        started = rest.partition("-")[0]
        if not pid.isdecimal() or str(process_start(int(pid))) != started:
            file.unlink(missing_ok=True)
        elif int(pid) != os.getpid():
            found = True
    return found


def _users(directory: Path) -> Path:
    return directory / "users"
