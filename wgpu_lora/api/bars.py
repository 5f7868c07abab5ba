"""Progress of calls from Python: a bar on a terminal and in a notebook, silence anywhere else."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from wgpu_lora.bounded import printable

if TYPE_CHECKING:
    from wgpu_lora.gpu.tuner import Tuning
    from wgpu_lora.models.load import Progress
    from wgpu_lora.models.loaded import LoadedModel
    from wgpu_lora.train.progress import StepResult
    from wgpu_lora.train.slot import AdapterRun


def seen(wanted: bool | None) -> bool:
    """Whether to show progress: as `wanted`, or where that is None, if a person sees stderr."""
    if wanted is not None:
        return wanted
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook, whose stderr is no terminal and is read all the same."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


class Bars:
    """A bar at a time, made at its first news; `with` takes the last one away.

    tqdm's: in a notebook it is a widget, or text where ipywidgets is missing.
    """

    def __init__(self, shown: bool | None = None):
        self._shown, self._text = seen(shown), ""
        self._bar: Any = None
        self._steps: dict[int, tuple[int, int]] = {}  # by slot, those taken and those in all

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def to(self, text: str, count: int, total: int | None, unit: str, facts: str = "") -> None:
        """Shows that `count` of `total` units are done; another text begins another bar."""
        if not self._shown:
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
            self._bar.set_postfix_str(printable(facts), refresh=False)
        self._bar.update(count - self._bar.n)

    def loading(self, model: LoadedModel) -> Progress:
        """For whatever loads this model's weights."""
        total, loaded = model.tensors_to_load(), 0

        def advance(name: str) -> None:
            nonlocal loaded
            loaded += 1
            self.to(f"loading {model.name}", loaded, total, " tensors")

        return advance

    def tuning(self, tuning: Tuning) -> None:
        """What is timed before the weights are loaded."""
        facts = f"{tuning.kernel}, size {min(tuning.sizes_done + 1, tuning.sizes)} of {tuning.sizes}"
        self.to("tuning", round(tuning.seconds), round(tuning.expected or tuning.limit), " s", facts)

    def measuring(self, run: AdapterRun, rows: int, loss: float | None) -> None:
        """The held-out loss before the first step."""
        if not run.state.step and loss is None and run.heldout:
            self.to("held-out loss", rows, len(run.heldout.rows), " rows")

    def evaluating(self, done: int, total: int) -> None:
        """Rows whose loss is measured."""
        self.to("evaluating", done, total, " rows")

    def step(self, result: StepResult) -> None:
        """A step of a training run, or of one of a pipeline's."""
        facts = f"loss {result.loss:.4f}, lr {result.learning_rate:.2e}"
        if result.eval_loss is not None:
            facts += f", held-out {result.eval_loss:.4f}"
        self._steps[result.slot] = result.step, result.total_steps
        taken, total = (sum(numbers) for numbers in zip(*self._steps.values(), strict=True))
        self.to("training", taken, total or None, " steps", f"{result.adapter}: {facts}" if result.adapter else facts)


def _tqdm() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no ipywidgets
        from tqdm.auto import tqdm
    return tqdm
