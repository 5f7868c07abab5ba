"""Progress bars for calls from Python, on terminals and in notebooks only."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from wgpu_lora.events import Evaluating, Events, StepResult, Tuning
from wgpu_lora.names.text import escape_unprintable


def shows_progress(progress_bar: bool | None) -> bool:
    """Whether to show progress: `progress_bar`, or if None, whether stderr is a terminal or a notebook."""
    if progress_bar is not None:
        return progress_bar
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook, whose stderr is not a terminal but is shown."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


class Bars(Events):
    """One bar at a time, created by its first event; leaving the context removes the last one.

    Uses tqdm: in a notebook, a bar is a widget, or text without ipywidgets.
    """

    def __init__(self, enabled: bool | None = None):
        self._enabled, self._text = shows_progress(enabled), ""
        self._bar: Any = None
        self._steps: dict[int, tuple[int, int]] = {}  # (taken, total) by slot

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def to(self, text: str, count: int, total: int | None, unit: str, facts: str = "") -> None:
        """Show that `count` of `total` units are done; a different text starts a new bar."""
        if not self._enabled:
            return
        if self._bar is None or text != self._text:
            self.close()
            self._bar, self._text = (
                _tqdm()(desc=text, total=total, unit=unit, initial=max(0, count - 1), dynamic_ncols=True),
                text,
            )
        if total != self._bar.total:
            self._bar.total = total
        if facts:
            self._bar.set_postfix_str(escape_unprintable(facts), refresh=False)
        self._bar.update(count - self._bar.n)

    def loading(self, model: str, tensor: str, done: int, total: int) -> None:
        self.to(f"loading {model}", done, total, " tensors")

    def tuning(self, tuning: Tuning) -> None:
        facts = f"{tuning.kernel}, tiling {min(tuning.tilings_done + 1, tuning.tilings)} of {tuning.tilings}"
        self.to("tuning", round(tuning.seconds), round(tuning.expected or tuning.limit), " s", facts)

    def evaluating(self, evaluating: Evaluating) -> None:
        if evaluating.loss is None and not evaluating.step:  # measurements during training are short
            text = "evaluating" if evaluating.step is None else "held-out loss"
            self.to(text, evaluating.rows, evaluating.total, " rows")

    def answering(self, done: int, total: int, tokens: int) -> None:
        if total > 1:
            self.to("answering", done, total, " prompts")

    def step(self, result: StepResult) -> None:
        facts = result.facts(", ")
        if result.eval_loss is not None:
            facts += f", held-out {result.eval_loss:.4f}"
        self._steps[result.slot] = result.step, result.total_steps
        steps, total = (sum(numbers) for numbers in zip(*self._steps.values(), strict=True))
        self.to("training", steps, total or None, " steps", f"{result.adapter}: {facts}" if result.adapter else facts)


def _tqdm() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing ipywidgets
        from tqdm.auto import tqdm
    return tqdm
