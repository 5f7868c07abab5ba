"""Records one run in the run log: a line when it begins, and one when it ends."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any

from wgpu_lora.errors import TrackingWarning
from wgpu_lora.files.paths import working_folder
from wgpu_lora.train.track.run_log import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    Losses,
    Process,
    RunEntry,
    RunLog,
    facts_of,
    git_state,
    new_id,
    now,
    run_log_enabled,
)


@dataclass(frozen=True)
class RunNotes:
    """The goal and notes that a command gives its runs. log: whether they are logged."""

    goal: str | None = None
    notes: str | None = None
    log: bool = True


_REMARKS: ContextVar[RunNotes] = ContextVar("remarks", default=RunNotes())  # noqa: B039 (frozen)


@contextmanager
def remarks(goal: str | None = None, notes: str | None = None, log: bool = True) -> Iterator[None]:
    """Runs recorded in the block get this goal and these notes."""
    token = _REMARKS.set(RunNotes(goal, notes, log))
    try:
        yield
    finally:
        _REMARKS.reset(token)


def current_remarks() -> RunNotes:
    return _REMARKS.get()


class Recording:
    """A run in the run log. A log that cannot be written costs a warning, and the run goes on.

    entry: the run's first line. requested: whether the user wants it to be logged.
    """

    def __init__(self, entry: RunEntry, requested: bool = True):
        self.entry = entry
        self._log = RunLog() if run_log_enabled(requested) else None
        self._append(facts_of(entry))

    @classmethod
    def of(cls, kind: str, name: str, requested: bool = True, resumed: str | None = None, **facts: Any) -> Recording:
        """Begin a run in this process, now, with what is the same for all kinds.

        resumed: the id of the run that it continues.
        """
        current = current_remarks()
        facts = {"goal": current.goal, "notes": current.notes, **facts}
        entry = RunEntry(
            id=resumed or new_id(),
            date=now(),
            resumed=now() if resumed else None,
            kind=kind,
            name=name,
            recorded=RUNNING,
            command=list(sys.argv),
            directory=str(working_folder()),
            process=Process.current(),
            **facts,
        )
        logged = requested and current.log
        return cls(replace(entry, git=git_state()) if run_log_enabled(logged) and "git" not in facts else entry, logged)

    def end(self, status: str, losses: Losses | None = None, **facts: Any) -> None:
        """Log how it ended; `facts` are fields of Entry."""
        result = {} if losses is None else {"losses": asdict(losses), "improvement": losses.improvement}
        self._append({"id": self.entry.id, "recorded": status, "ended": now(), **result, **facts})

    def _append(self, facts: dict[str, Any]) -> None:
        if self._log is None:
            return
        try:
            self._log.append(facts)
        except (OSError, NotImplementedError) as error:  # the latter where a file system has no locks
            why = getattr(error, "strerror", None) or "it cannot be locked"
            warnings.warn(
                f"the run log {self._log.path} cannot be written ({why}), so this run is not in it: fix that, or set "
                "WGPU_LORA_DATA_DIR to another directory",
                TrackingWarning,
                stacklevel=2,
            )
            self._log = None


def status_of(error: BaseException) -> dict[str, Any]:
    """The status of a run that an exception ended, and its message."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return {"status": INTERRUPTED}
    return {"status": FAILED, "error": str(error) or type(error).__name__}


@contextmanager
def recorded(kind: str, name: str, **facts: Any) -> Iterator[dict[str, Any]]:
    """Record what runs in the block; it fills the yielded dict with fields of Entry, and `status` if not finished."""
    result: dict[str, Any] = {}
    recording = Recording.of(kind, name, **facts)
    try:
        yield result
    except BaseException as error:
        recording.end(**{**result, **status_of(error)})
        raise
    recording.end(**{"status": FINISHED, **result})


def note_failure(entry: dict[str, Any], errors: Sequence[str]) -> None:
    """Let a run that ends without an exception be a failed one, if there are errors."""
    if errors:
        entry |= {"status": FAILED, "error": "; ".join(errors)}


def device_facts(info: Any) -> dict[str, str]:
    """The device of a run, from its DeviceInfo."""
    return {name: str(getattr(info, name)) for name in ("name", "driver", "backend", "kind")}


def given_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those that are not set."""
    return {name: value for name, value in values.items() if value is not None}
