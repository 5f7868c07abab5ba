"""run.json and pipeline.json as Python has them: `RunRecord`, and `PipelineRecord` of several adapters."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.errors import UserError
from wgpu_lora.strict_json import built, to_json
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.ending import OUTCOMES
from wgpu_lora.train.schema import SCHEMA, schema_of
from wgpu_lora.train.state import RunState

RUN, PIPELINE = "run.json", "pipeline.json"


@dataclass(frozen=True)
class Data:
    """Rows that were read: where from, the SHA-256 of what they became, and what that was, in a line."""

    path: str
    digest: str
    summary: str


@dataclass(frozen=True)
class HeldOut:
    """Rows that were held out."""

    path: str
    digest: str


@dataclass(frozen=True)
class Memory:
    """Bytes on the device: planned by group, planned at the peak, and what was allocated at the most."""

    groups: dict[str, int]
    peak: int
    peak_allocated: int


@dataclass(frozen=True)
class UsedDevice:
    """The device that a run was computed on. kind: discrete, integrated, software ..."""

    name: str
    driver: str
    backend: str
    kind: str
    subgroup_size: int
    checked_shaders: bool


@dataclass(frozen=True)
class Environment:
    """Versions by package, the operating system, the device and the command line: what else a run depends on."""

    versions: dict[str, str]
    platform: str
    device: UsedDevice
    command: list[str]


@dataclass(frozen=True, repr=False)
class RunRecord:
    """What run.json holds of a run that has ended.

    Attributes:
        stop_reason: one of `ending.STOP_TEXT`. signal: the name of the signal that interrupted it, if one did.
        damaged_log_lines: lines of log.jsonl that were left out when it was resumed.
        options: all of them, as the run had them. state: steps, tokens, seconds and losses.
        base_digest: of the base's names, shapes and the edges of its shards; base_sha256: of all its values.
        adapter_sha256, init_adapter_sha256: of the adapter's weights, and of those that it began from.
        trainable_parameters: of the adapter.
    """

    stop_reason: str
    signal: str | None
    damaged_log_lines: int
    options: TrainingArguments
    state: RunState
    data: Data
    eval_data: HeldOut | None
    base_digest: str
    base_sha256: str | None
    init_adapter_sha256: str | None
    adapter_sha256: str
    trainable_parameters: int
    memory: Memory
    environment: Environment

    @property
    def outcome(self) -> str:
        """finished, stopped early, interrupted or failed."""
        return OUTCOMES.get(self.stop_reason, self.stop_reason)

    @property
    def steps(self) -> int:
        """Optimizer steps that were taken."""
        return self.state.step

    @property
    def loss(self) -> float | None:
        """The training loss of the last step; None before the first."""
        return self.state.last_loss

    @property
    def eval_loss(self) -> float | None:
        """The last held-out loss; None where nothing is held out."""
        return self.state.last_eval_loss

    @property
    def directory(self) -> Path:
        """Where the adapter is."""
        return self.options.directory

    def to_json(self) -> dict[str, Any]:
        """What run.json holds."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, facts: Any, path: Path = Path(RUN)) -> RunRecord:
        """The record that run.json holds; `path` is what errors name.

        Raises:
            NewerSchemaError: a later version wrote it. UserError: an option cannot be.
            ValueError: something else is missing, or of another type.
        """
        schema_of(facts, path)
        return built(cls, facts)

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        """Reads the run.json of a run's directory.

        Raises:
            UserError: there is none, it is damaged, or a later version wrote it.
        """
        path = directory / RUN
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")), path)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{directory} holds no finished run (there is no {RUN}): give its --output.") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"The run in {directory} cannot be read: {error}.") from error

    def write(self, directory: Path) -> None:
        _write(directory / RUN, self.to_json())

    def __repr__(self) -> str:
        losses = {"loss": self.loss, "eval_loss": self.eval_loss}
        shown = "".join(f", {name}={value:.4f}" for name, value in losses.items() if value is not None)
        return f"RunRecord(stop_reason={self.stop_reason!r}, steps={self.steps}{shown}, output={self.options.output!r})"

    def __getitem__(self, name: str) -> Any:
        """As version 0.1.0 returned run.json's contents; to be removed in the version after this one."""
        message = f"a RunRecord has attributes: use result.{name} instead of result[{name!r}], or result.to_json()"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.to_json()[name]


@dataclass(frozen=True)
class AdapterLosses:
    """The last training loss, and the held-out losses before the first step, last and best."""

    train: float | None
    before: float | None
    held_out: float | None
    best: float | None


@dataclass(frozen=True)
class AdapterRecord:
    """What became of an adapter of a pipeline; more is in the run.json of its own directory, `checkpoint`."""

    slot: int
    name: str
    data: Data
    checkpoint: str
    stop_reason: str
    step: int
    total_steps: int
    tokens: int
    seconds: float
    losses: AdapterLosses
    trainable_parameters: int
    adapter_sha256: str

    @property
    def outcome(self) -> str:
        """finished, stopped early, interrupted or failed."""
        return OUTCOMES.get(self.stop_reason, self.stop_reason)


@dataclass(frozen=True, repr=False)
class PipelineRecord:
    """What pipeline.json holds. options: those of all adapters. step: steps of the whole, of whichever adapters."""

    step: int
    signal: str | None
    schedule: str
    batch_tokens: int
    options: TrainingArguments
    adapters: list[AdapterRecord]
    memory: Memory
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """What pipeline.json holds."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, facts: Any, path: Path = Path(PIPELINE)) -> PipelineRecord:
        """The record that pipeline.json holds; raises as `RunRecord.from_json`."""
        if schema_of(facts, path) == 1:  # which had them among the options
            facts = {**facts, **_of_options(facts, "schedule", "batch_tokens")}
        return built(cls, facts)

    def write(self, directory: Path) -> None:
        _write(directory / PIPELINE, self.to_json())

    def __repr__(self) -> str:
        adapters = ", ".join(f"{one.name}: {one.outcome}" for one in self.adapters)
        return f"PipelineRecord(steps={self.step}, {adapters})"


def _of_options(facts: dict[str, Any], *names: str) -> dict[str, Any]:
    """These of the options, as facts of their own, and the options without them."""
    options = facts.get("options")
    if not isinstance(options, dict):
        return {}
    own = {name: options[name] for name in names if name in options}
    return own | {"options": {name: value for name, value in options.items() if name not in own}}


def _write(path: Path, facts: dict[str, Any]) -> None:
    write_bytes_atomic(path, (to_json(facts, indent=1) + "\n").encode())
