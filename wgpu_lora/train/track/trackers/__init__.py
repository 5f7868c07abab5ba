"""Programs that runs are reported to (`--report-to`) through their own libraries, a file each."""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

from wgpu_lora.errors import TrackingWarning, UserError
from wgpu_lora.files.installation import pip_line
from wgpu_lora.names.registry import Registry
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.train.track.secret_masking import masked

PROJECT = "wgpu-lora"
MAX_ERROR = 300  # characters
JSONL = "jsonl"  # log.jsonl, which every run has
NOTHING = "none"  # as transformers has it


@dataclass(frozen=True)
class TrackedRun:
    """A run for a tracker.

    id: the same when the run is resumed. name: for people. group: of the runs of a pipeline.
    directory: the run's own. config: its options, without secrets.
    step: the last one of a resumed run, 0 for a new one.
    """

    id: str
    name: str
    directory: str
    group: str | None = None
    notes: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    step: int = 0


class Tracker(ABC):
    """Reports a run. Whatever a method raises ends the tracker with a warning, and the run goes on.

    module: of its library, imported when the tracker is created. extra: of this package, that installs it.
    url: where the run is shown, a path or URL, if it is known.
    """

    module: ClassVar[str]
    extra: ClassVar[str]
    url: str | None = None

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None: ...

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Report metrics, by the names of transformers: train/loss, eval/loss."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """The run has ended with a status of the run log."""


TRACKERS: Registry[type[Tracker]] = Registry(
    {
        "tensorboard": "wgpu_lora.train.track.trackers.tensorboard:TensorBoard",
        "wandb": "wgpu_lora.train.track.trackers.wandb:WandB",
        "trackio": "wgpu_lora.train.track.trackers.trackio:Trackio",
    }
)
NAMES = (*TRACKERS, JSONL)
HELP = f"Trackers to report to, separated by commas: {', '.join(NAMES)} (log.jsonl, which is always written)."


def trackers_of(report_to: str | None) -> list[str]:
    """The trackers of a comma-separated list, besides log.jsonl.

    Raises:
        UserError: a name is not known.
    """
    names = [name.strip() for name in (report_to or "").split(",")]
    for name in names:
        if name not in (*NAMES, NOTHING, ""):
            raise UserError(f"{flag('report_to')} must be one or more of {', '.join(NAMES)}, not {name!r:.60}.")
    return [name for name in dict.fromkeys(names) if name in TRACKERS]


def check_libraries(report_to: str | None) -> None:
    """Raise UserError if a tracker's library is not installed."""
    for name in trackers_of(report_to):
        kind = TRACKERS[name]
        if not _installed(kind.module):
            raise UserError(
                f"{setting('report_to', name)} needs {kind.module}, which is not installed: {pip_line(kind.extra)}"
            )


def _installed(module: str) -> bool:
    """Whether a module is installed; a folder of the same name, such as wandb's own, is not."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


class GuardedTracker:
    """A tracker whose failures never reach the run: the first one is a TrackingWarning, and no call follows it.

    What the library prints goes to standard error. A library that blocks holds up the run.
    """

    def __init__(self, name: str, run: TrackedRun):
        self.name = name
        self._tracker: Tracker | None = None
        self._failed = False
        self._tracker = self._guarded(lambda: TRACKERS[name](run))

    @property
    def url(self) -> str:
        """Where the run is shown; '' if that is not known."""
        return str(masked((self._tracker and self._tracker.url) or ""))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._tracker and not self._failed:
            self._guarded(self._tracker.log, metrics, step)

    def finish(self, status: str) -> None:
        if self._tracker and not self._failed:
            self._guarded(self._tracker.finish, status)

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with redirect_stdout(sys.stderr):
                return call(*arguments)
        except (Exception, SystemExit) as error:  # some libraries exit
            self._failed = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR]
            message = f"{self.name} is not reported to any more: {masked(reason)}; the run and its log.jsonl go on"
            warnings.warn(message, TrackingWarning, stacklevel=3)
