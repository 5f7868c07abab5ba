"""Output of a run before its first step: what is tuned on this device, and the loading of weights."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wgpu_lora.cli.console import Bar, line
from wgpu_lora.events import Evaluating, Events, Tuning
from wgpu_lora.names.text import count_noun, duration

if TYPE_CHECKING:
    from wgpu_lora.train.job import Job


def describe_tuning(job: Job[Any]) -> None:
    """Print a line if kernels remain to be tuned."""
    tuner = job.tuner()
    tuning = tuner.estimate(job.session.programs()) if tuner else None
    if tuning and tuning.sizes:
        expected = tuning.expected
        takes = f"at most {duration(tuning.limit)}" if expected is None else f"about {duration(expected)}"
        sizes = count_noun(tuning.sizes, "kernel size")
        line("tuning", f"{sizes} will be timed on this device, once: {takes}, before the first step")


class StartupProgress(Events):
    """Bars of tuning and of loading, one after the other, then what `ready` shows."""

    def __init__(self, job: Job[Any]):
        self._tensors_to_load = job.session.model.tensors_to_load()
        self._bar: Bar | None = None

    def ready(self) -> None:
        """Called when the weights are loaded; the first step compiles its kernels, which takes a while."""

    def waiting(self, place: int, holders: Sequence[str], seconds: float) -> None:
        names = ", ".join(holders) or "other programs"
        line("waiting", f"place {place} in the queue, {seconds:.0f} s so far; the device's memory is held by {names}")

    def tuning(self, tuning: Tuning) -> None:
        if tuning.over:
            self.close()
            text = f"{count_noun(tuning.sizes_done, 'kernel size')} in {duration(tuning.seconds)}"
            if tuning.sizes_done < tuning.sizes:
                text += f"; {tuning.sizes - tuning.sizes_done:,} keep their defaults, as a tiling takes up to "
                text += f"{duration(tuning.longest)} here: 'wgpu-lora tune --seconds N' takes longer"
            line("tuned", text)
            if not self._tensors_to_load:
                self.ready()
            return
        if not self._bar:
            self.close()
            self._bar = Bar("tuning", None, " s")
        text = f"tuning: {tuning.kernel}, tiling {tuning.tilings_done + 1} of {tuning.tilings}"
        self._bar.advance(text, tuning.seconds, tuning.expected or tuning.limit)

    def loading(self, model: str, tensor: str, done: int, total: int) -> None:
        if not self._bar:
            self._bar = Bar("loading", self._tensors_to_load)
        self._bar.advance()
        self._tensors_to_load -= 1
        if not self._tensors_to_load:
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


MOST = 48  # bars of a whole run
BARS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*#@"  # the latter for streams that cannot take the former


class Trend:
    """The means of equally many values each, at most MOST of them; memory does not grow with the run.

    stream: what the bars are written to, before rich replaces it by one that does not know its encoding.
    """

    def __init__(self, stream: Any) -> None:
        self._marks = BARS if _takes(stream, BARS) else PLAIN
        self._means: list[float] = []
        self._group_size, self._group = 1, list[float]()

    def add(self, value: float) -> None:
        """Add a value; those that are not finite are left out."""
        if not math.isfinite(value):
            return
        self._group.append(value)
        if len(self._group) < self._group_size:
            return
        self._means.append(statistics.fmean(self._group))
        self._group = []
        if len(self._means) > MOST:
            self._means = [statistics.fmean(self._means[i : i + 2]) for i in range(0, len(self._means) - 1, 2)]
            self._group_size *= 2

    def bars(self, width: int = MOST) -> str:
        """The last `width` bars; from the lowest to the highest of the values that they show."""
        means = self._means[-width:]
        if len(means) < 2:
            return ""
        minimum, maximum = min(means), max(means)
        steps = (len(self._marks) - 1) / ((maximum - minimum) or 1.0)
        return "".join(self._marks[round(steps * (mean - minimum))] for mean in means)


def _takes(stream: Any, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def hardware(line: Any) -> str:
    """The status of the hardware in a line of the log, as text."""
    units = {"gpu_busy": "{:.0f}% busy", "gpu_power": "{:.0f} W", "gpu_temperature": "{:.0f} °C"}
    return ", ".join(form.format(line[name]) for name, form in units.items() if name in line)
