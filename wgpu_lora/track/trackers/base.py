"""The interface of a tracker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

PROJECT = "wgpu-lora"


@dataclass(frozen=True)
class Tracked:
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
    """Reports a run. It is created in a process of its own, where it may block, raise, print or exit.

    module: of its library, imported when the tracker is created. extra: of this package, that installs it.
    place: where the run is shown, a path or URL, if known.
    """

    module: ClassVar[str]
    extra: ClassVar[str]
    place: str | None = None

    @abstractmethod
    def __init__(self, run: Tracked) -> None: ...

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Report metrics, by the names of transformers: train/loss, eval/loss."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """The run has ended with a status of the run log."""
