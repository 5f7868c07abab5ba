"""What jobs tell while they run: one class for training, evaluating, generating and measuring alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Tuning:
    """What there is to time before a run, and how far that is.

    Attributes:
        sizes: kernel sizes that have to be timed on this device, and `tilings` of them in all.
        limit: seconds that tuning may take; nothing is begun that would take longer.
        each: seconds that a tiling took here so far, compilation included; None before the first ever.
        longest: seconds of the one that took longest since the beginning, so that the next keeps to the limit.
        kernel: the one at hand.
        sizes_done, tilings_done, seconds: since the beginning.
        over: whether this is the last that is heard of it.
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
        """Seconds of the whole, None where nothing is known yet."""
        if self.each is None:
            return None
        return min(self.limit, self.seconds + (self.tilings - self.tilings_done) * self.each)


@dataclass(frozen=True)
class Evaluating:
    """A loss that is being measured: `rows` of `total` are done; `loss` once it is known.

    step: of the run whose held-out loss it is, 0 before the first; None outside of training. adapter: its name in a
    pipeline.
    """

    rows: int
    total: int
    loss: float | None = None
    step: int | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class StepResult:
    """A slot's optimizer step.

    adapter: its name in a pipeline, None for a run by itself. tokens: trained so far; step_tokens: in this step;
    step_processed_tokens: that went through the model in this step, prompts included. metrics: the objective's.
    seconds: of the step alone, held-out loss excluded; where slots share a step, this one's part of it by tokens.
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
        """Loss, metrics and learning rate, as they are shown."""
        metrics = (f"{name} {value:.4f}" for name, value in self.metrics.items())
        return gap.join([f"loss {self.loss:.4f}", *metrics, f"lr {self.learning_rate:.2e}"])


class Events:
    """Override the methods that you want to hear of; those of this class do nothing. They are called in the job's own
    thread, so a job waits until they return."""

    def waiting(self, place: int, holders: Sequence[str], seconds: float) -> None:
        """The job queues for memory: its place from 1, who holds the memory, seconds waited so far."""

    def tuning(self, tuning: Tuning) -> None:
        """Before each tiling that is timed, and once at the end, where any was."""

    def loading(self, model: str, tensor: str, done: int, total: int) -> None:
        """A tensor of the base is on the device, the last of `done` out of `total`."""

    def evaluating(self, evaluating: Evaluating) -> None:
        """Before the first row of a loss, after each batch of rows and, of a held-out loss, once it is known."""

    def step(self, result: StepResult) -> bool | None:
        """After each optimizer step of each adapter; True ends the run."""

    def saved(self, directory: Path, step: int, adapter: str | None) -> None:
        """A checkpoint is on disk. adapter: its name in a pipeline."""

    def text(self, piece: str) -> None:
        """A piece of the only answer, as it comes."""

    def answering(self, done: int, total: int, tokens: int) -> None:
        """After each token: prompts that are answered, of how many, and tokens of all answers so far."""

    def answered(self, number: int, name: str | None, answer: Any) -> None:
        """A prompt, by its number from 0, has its `Answer`. name: the adapter's, where several are asked."""

    def measuring(self, brick: str, case: str) -> None:
        """A brick of `bench` is about to be measured."""

    def measured(self, record: Mapping[str, Any]) -> None:
        """A line of a benchmark's result."""


SILENT = Events()


class Passing(Events):
    """Passes everything on to others, in order: a base for whoever changes some of it on the way."""

    def __init__(self, *to: Events):
        self.to = to


def _passing(name: str) -> Any:
    def tell(self: Passing, *arguments: Any) -> bool | None:
        said = [getattr(one, name)(*arguments) for one in self.to]
        return True in said or None

    return tell


for _name in [name for name in vars(Events) if not name.startswith("_")]:
    setattr(Passing, _name, _passing(_name))
