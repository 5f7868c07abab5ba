"""How the progress of a chain is shown."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wgpu_lora.events import SILENT, Events

if TYPE_CHECKING:
    from wgpu_lora.train.finetune import FinetuneJob


class Watch:
    """How a stage's progress is shown; override what is of interest."""

    def reading(self, text: str, done: float, total: float | None) -> None:
        """Progress in megabytes."""

    def tensors(self, text: str, total: int) -> AbstractContextManager[Events]:
        """A listener to tensors that are written."""
        return nullcontext(SILENT)

    def training(self, job: FinetuneJob) -> AbstractContextManager[Events]:
        return nullcontext(SILENT)

    def trained(self, record: Any) -> None:
        """The record of a run that has ended."""

    def said(self, label: str, text: str) -> None:
        """A line about the stage's result."""


class ChainWatch(Watch):
    """Also hears which stages run."""

    def stage(self, number: int, name: str, kind: str, why: str, seconds: float | None) -> None:
        """A stage begins. seconds: that it and those after it took when they last ran, None if not all are known."""

    def skipped(self, number: int, name: str, kind: str) -> None:
        """A stage is up to date."""

    def finished(self, name: str, output: Path, seconds: float) -> None:
        """A stage has run."""
