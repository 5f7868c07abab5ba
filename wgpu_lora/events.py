"""Progress events of jobs: training, evaluation, generation, conversion and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Tuning:
    """Progress of kernel tuning before a run.

    Attributes:
        sizes: kernel sizes to be timed on this device, with `tilings` tilings in total.
        limit: seconds that tuning may take; no timing is started that would exceed it.
        each: average seconds per tiling so far, including compilation; None before the first.
        longest: seconds of the slowest tiling so far, used to keep to the limit.
        kernel: name of the current kernel.
        sizes_done, tilings_done, seconds: so far. A size is done once its tilings have been compared.
        over: whether this is the last event.
    """

    sizes: int
    tilings: int
    limit: float
    each: float | None = None
    longest: float = 0.0
    kernel: str = ""
    sizes_done: int = 0
    tilings_done: int = 0
    seconds: float = 0.0
    over: bool = False

    @property
    def expected(self) -> float | None:
        """Expected total seconds; None if nothing is known yet."""
        if self.each is None:
            return None
        return min(self.limit, self.seconds + max(0, self.tilings - self.tilings_done) * self.each)


@dataclass(frozen=True)
class WrongKernel:
    """A kernel that the device's driver gets wrong in a tiling, which is not used.

    tiling: its fields. nmse: mean squared error relative to the mean square of the float64 reference, and its `limit`;
        None if it does not compile, for this `reason`.
    """

    device: str
    driver: str
    kernel: str
    tiling: Mapping[str, Any]
    nmse: float | None
    limit: float
    reason: str = ""

    @property
    def difference(self) -> str:
        if self.nmse is None:
            return self.reason
        return f"NMSE {self.nmse:.2g} against the float64 reference, at most {self.limit:.2g}"

    def __str__(self) -> str:
        tile = "{rows}x{cols}, span {span}".format_map(self.tiling)
        tiling = f"{self.tiling['family']} {tile}" + (", 64-bit loads" if self.tiling["wide"] else "")
        wrong = f"does not compile {self.kernel}" if self.nmse is None else f"gets {self.kernel} wrong"
        return f"{self.device} ({self.driver}) {wrong} in the tiling {tiling}, which is not used: {self.difference}"


@dataclass(frozen=True)
class Evaluating:
    """Progress of a loss measurement: `rows` of `total` are done; `loss` is set at the end.

    step: the run's step, 0 before the first, None outside of training. adapter: its name in a pipeline.
    """

    rows: int
    total: int
    loss: float | None = None
    step: int | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class StepResult:
    """A slot's optimizer step.

    adapter: its name in a pipeline, None for a single run. tokens: trained tokens so far; step_tokens: in this step;
    step_processed_tokens: all tokens of this step, prompts included. metrics: the objective's.
    seconds: of the step, without the held-out loss; if slots share a step, this slot's share by tokens.
    """

    step: int
    total_steps: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    seconds: float
    eval_loss: float | None
    adapter: str | None = None
    slot: int = 0
    step_tokens: int = 0
    step_processed_tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    def facts(self, gap: str = "  ") -> str:
        """Loss (of a run that learns from rewards, the reward), metrics and learning rate as text."""
        values = self.metrics if "reward" in self.metrics else {"loss": self.loss, **self.metrics}
        metrics = (f"{name} {value:.4f}" for name, value in values.items())
        return gap.join([*metrics, f"lr {self.learning_rate:.2e}"])

    @property
    def progress(self) -> float:
        """What shows progress: the reward of a run that learns from rewards, else the loss."""
        return self.metrics.get("reward", self.loss)


class Events:
    """Callbacks of a job; override the methods of interest, the defaults do nothing.

    They are called in the job's own thread, so the job waits until they return.
    """

    def waiting(self, place: int, holders: Sequence[str], seconds: float) -> None:
        """The job waits for memory: its place in the queue from 1, the holders of the memory, seconds waited so far."""

    def tuning(self, tuning: Tuning) -> None:
        """Before each timed tiling, and once at the end if there were any."""

    def miscompiled(self, found: WrongKernel) -> None:
        """The device gets a kernel wrong; another tiling is used or, if there is none, the job ends with an error."""

    def loading(self, model: str, tensor: str, done: int, total: int) -> None:
        """A tensor of the base model has been loaded, the last of `done` out of `total`."""

    def written(self, tensor: str, done: int, total: int) -> None:
        """A tensor of a model has been written to a file, the last of `done` out of `total`."""

    def evaluating(self, evaluating: Evaluating) -> None:
        """Before the first row of a loss, after each batch of rows and, for a held-out loss, once it is known."""

    def step(self, result: StepResult) -> bool | None:
        """After each optimizer step of each adapter; True ends the run."""

    def logged(self, line: Mapping[str, float], adapter: str | None) -> None:
        """A line of log.jsonl has been written. adapter: its name in a pipeline."""

    def tracked(self, tracker: str, place: str, adapter: str | None) -> None:
        """A tracker shows the run at this path or URL. adapter: its name in a pipeline."""

    def saved(self, directory: Path, step: int, adapter: str | None) -> None:
        """A checkpoint has been written. adapter: its name in a pipeline."""

    def retired(self, reason: str, adapter: str | None) -> None:
        """An adapter's training has ended for one of `stop_reasons.STOP_TEXT`, and its results have been written.

        adapter: its name in a pipeline, whose others may go on.
        """

    def text(self, piece: str) -> None:
        """A piece of the answer as it is generated, if there is only one prompt."""

    def answering(self, done: int, total: int, tokens: int) -> None:
        """After each token: finished prompts, all prompts, and tokens of all answers so far."""

    def answered(self, number: int, name: str | None, answer: Any) -> None:
        """A prompt, by its number from 0, has been answered. name: the adapter's, if there are several."""

    def measuring(self, brick: str, case: str) -> None:
        """Before a brick of `bench` is measured."""

    def measured(self, record: Mapping[str, Any]) -> None:
        """A result record of a benchmark."""


SILENT = Events()


class EventForwarder(Events):
    """Forwards all events to others, in order; a base class for filters."""

    def __init__(self, *to: Events):
        self.to = to


def _forwarder(name: str) -> Any:
    def tell(self: EventForwarder, *arguments: Any) -> bool | None:
        answers = [getattr(receiver, name)(*arguments) for receiver in self.to]
        return True in answers or None

    return tell


for _name in [name for name in vars(Events) if not name.startswith("_")]:
    setattr(EventForwarder, _name, _forwarder(_name))
