"""Output of a run before its first step: what is tuned on this device, and the loading of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wgpu_lora.cli.console import Bar, duration, line
from wgpu_lora.events import Evaluating, Events, Tuning
from wgpu_lora.words import counted

if TYPE_CHECKING:
    from wgpu_lora.train.job import Job


def describe_tuning(job: Job[Any]) -> None:
    """Print a line if kernels remain to be tuned."""
    tuner = job.tuner()
    tuning = tuner.estimate(job.session.programs()) if tuner else None
    if tuning and tuning.sizes:
        known = tuning.expected
        takes = f"at most {duration(tuning.limit)}" if known is None else f"about {duration(known)}"
        sizes = counted(tuning.sizes, "kernel size")
        line("tuning", f"{sizes} will be timed on this device, once: {takes}, before the first step")


class Starting(Events):
    """Bars of tuning and of loading, one after the other, then what `ready` shows."""

    def __init__(self, job: Job[Any]):
        self._left = job.session.model.tensors_to_load()
        self._bar: Bar | None = None

    def ready(self) -> None:
        """Called when the weights are loaded; the first step compiles its kernels, which takes a while."""

    def waiting(self, place: int, holders: Sequence[str], seconds: float) -> None:
        held = ", ".join(holders) or "other programs"
        line("waiting", f"place {place} in the queue, {seconds:.0f} s so far; the device's memory is held by {held}")

    def tuning(self, tuning: Tuning) -> None:
        if tuning.over:
            self.close()
            text = f"{counted(tuning.sizes_done, 'kernel size')} in {duration(tuning.seconds)}"
            if tuning.sizes_done < tuning.sizes:
                text += f"; {tuning.sizes - tuning.sizes_done:,} keep their defaults, as a tiling takes up to "
                text += f"{duration(tuning.longest)} here: 'wgpu-lora tune --seconds N' takes longer"
            line("tuned", text)
            if not self._left:
                self.ready()
            return
        if not self._bar:
            self.close()
            self._bar = Bar("tuning", None, " s")
        text = f"tuning: {tuning.kernel}, tiling {tuning.tilings_done + 1} of {tuning.tilings}"
        self._bar.advance(text, tuning.seconds, tuning.expected or tuning.limit)

    def loading(self, model: str, tensor: str, done: int, total: int) -> None:
        if not self._bar:
            self._bar = Bar("loading", self._left)
        self._bar.advance()
        self._left -= 1
        if not self._left:
            self.ready()

    def evaluating(self, evaluating: Evaluating) -> None:
        """A bar while a held-out loss is measured, and a line for the one before the first step."""
        mark = f"{evaluating.adapter}: " if evaluating.adapter else ""
        if evaluating.loss is not None:
            self.close()
            if not evaluating.step:
                line("held out", f"{mark}loss {evaluating.loss:.4f} before the first step")
                self.ready()
            return
        if not evaluating.rows:
            self.close()
            self._bar = Bar(f"{mark}measuring the held-out loss", evaluating.total, " rows")
        if self._bar:
            self._bar.advance(to=evaluating.rows)

    def tracked(self, tracker: str, place: str, adapter: str | None) -> None:
        line("tracker", f"{f'{adapter}: ' if adapter else ''}{tracker}, {place}")

    def close(self) -> None:
        if self._bar:
            self._bar.close()
            self._bar = None
