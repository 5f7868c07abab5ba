"""What an adapter's run is: its data, its options, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.data import Prepared
from wgpu_lora.formats.peft import AdapterConfig, Matrices
from wgpu_lora.models.lora import SlotSpec
from wgpu_lora.train.arguments import FREE_ON_RESUME, TrainingArguments
from wgpu_lora.train.output import Log
from wgpu_lora.train.state import RunState
from wgpu_lora.train.stream import DataStream

LOGGING_STEPS, SHORT = 10, 100  # a run of no more steps than SHORT logs every one


@dataclass
class Run:
    """Slot `slot` of a session. A fine-tune by itself is a pipeline of one.

    name: what a pipeline calls it; None by itself.
    notes: what was chosen for it, and how it goes on, for a person.
    """

    slot: int
    args: TrainingArguments
    adapter: AdapterConfig
    spec: SlotSpec
    initial: Matrices
    stream: DataStream
    heldout: Prepared | None
    base_digest: str
    config_digest: str
    name: str | None = None
    notes: tuple[str, ...] = ()
    state: RunState = field(default_factory=RunState)
    resumed_from: Path | None = None
    weights_sha256: str | None = None  # of the base, once it is loaded
    log: Log = field(init=False, repr=False, compare=False)  # from when it begins

    @property
    def adapter_name(self) -> str:
        """The name of an adapter of a pipeline."""
        assert self.name is not None, "a run by itself has no name"
        return self.name

    @property
    def directory(self) -> Path:
        return self.args.directory

    def logs(self, step: int, heldout: bool) -> bool:
        """Whether a step has a line in the log: one of the last, and of a held-out loss, always has."""
        every = self.args.logging_steps or (1 if self.state.total_steps <= SHORT else LOGGING_STEPS)
        return heldout or step % every == 0 or step >= self.state.total_steps

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with the one it continues, and how far it was to go."""
        options = {k: v for k, v in self.args.as_dict().items() if k not in FREE_ON_RESUME and k != "init_adapter"}
        base = {"base": self.base_digest, "config": self.config_digest, "weights": self.weights_sha256}
        return {"options": options, "data": self.stream.rows_digest(), **base}
