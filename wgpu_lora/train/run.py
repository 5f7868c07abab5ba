"""An adapter's run: its data, its options and its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.data import Prepared
from wgpu_lora.train.frozen import FrozenAdapter
from wgpu_lora.train.options.arguments import FREE_ON_RESUME, TrainingArguments
from wgpu_lora.train.output import Log
from wgpu_lora.train.records import RunRecord
from wgpu_lora.train.state import RunState
from wgpu_lora.train.storage import PLAIN, Storage
from wgpu_lora.train.stream import DataStream
from wgpu_lora.train.subject import Subject
from wgpu_lora.train.teachers import LiveTeacher

LOGGING_STEPS, SHORT = 10, 100  # runs of at most SHORT steps log every step


class Follower:
    """Follows a run in its job; this one does not."""

    def placed(self) -> None:
        """Called once the run's directory is its own."""

    def status(self) -> dict[str, float]:
        """The status of the hardware since the last call, by keys of the log."""
        return {}

    def end(self, record: RunRecord) -> None:
        """Called when the run has ended and its results are written."""


@dataclass
class Run:
    """Slot `slot` of a session. A single run is a pipeline of one.

    name: in a pipeline; None for a single run.
    notes: on chosen options and resuming, for the user.
    """

    slot: int
    args: TrainingArguments
    subject: Subject
    stream: DataStream
    heldout: Prepared | None
    base_digest: str
    config_digest: str
    name: str | None = None
    notes: tuple[str, ...] = ()
    reference: FrozenAdapter | None = None  # that the objective compares the adapter with, instead of the base alone
    teacher: LiveTeacher | None = None
    teacher_digest: str | None = None  # of the live one, or of its cache
    teacher_sha256: str | None = None  # of the live one's weights, once loaded
    storage: Storage = PLAIN
    state: RunState = field(default_factory=RunState)
    resumed_from: Path | None = None
    weights_sha256: str | None = None  # of the base, once loaded
    log: Log = field(init=False, repr=False, compare=False)  # once the run has started
    follower: Follower = field(default_factory=Follower, repr=False, compare=False)  # while its job runs

    @property
    def adapter_name(self) -> str:
        """The name of a pipeline's adapter."""
        assert self.name is not None, "a single run has no name"
        return self.name

    @property
    def directory(self) -> Path:
        return self.args.directory

    def logs(self, step: int, heldout: bool) -> bool:
        """Whether a step is logged; those with a held-out loss and the last of a planned number always are."""
        every = self.args.logging_steps or (1 if self.state.total_steps <= SHORT else LOGGING_STEPS)
        last = not self.args.target_seconds and step >= self.state.total_steps  # else `Progress.close` logs it
        return heldout or step % every == 0 or last

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the run it continues, and the planned length."""
        options = {k: v for k, v in self.args.as_dict().items() if k not in FREE_ON_RESUME and k != "init_adapter"}
        base = {"base": self.base_digest, "config": self.config_digest, "weights": self.weights_sha256}
        reference = {"reference": self.reference.digest} if self.reference else {}
        teacher = {"teacher": self.teacher_digest} if self.teacher_digest else {}
        teacher |= {"teacher_weights": self.teacher_sha256} if self.teacher_sha256 else {}
        return {"options": options, "data": self.stream.rows_digest(), **base, **reference, **teacher}
