"""run.json and pipeline.json in Python: `RunRecord`, and `PipelineRecord` for several adapters."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.files.json_files import to_json
from wgpu_lora.files.typed_json import typed
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.objectives import OBJECTIVES
from wgpu_lora.train.optimizers import OPTIMIZERS
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.run_state import SCHEMA, RunState, schema_of
from wgpu_lora.train.run.stop_reasons import OUTCOMES
from wgpu_lora.weights.base_formats import BASE_FORMATS

RUN, PIPELINE = "run.json", "pipeline.json"
# Options whose values are registered, with what messages call them.
REGISTERED: dict[str, tuple[str, Collection[str]]] = {
    "objective": ("objective", OBJECTIVES),
    "optim": ("optimizer", OPTIMIZERS),
    "base_dtype": ("base format", BASE_FORMATS),
}


@dataclass(frozen=True)
class Data:
    """Training data: path, SHA-256 of the file or of the rows, and a summary in one line.

    prompt_format: how the rows' prompts are worded ("chat", "alpaca" or "text"); None if they differ or have none.
    """

    path: str
    digest: str
    summary: str
    prompt_format: str | None = None


@dataclass(frozen=True)
class HeldOut:
    """Held-out data: path, and SHA-256 of the file or of the rows."""

    path: str
    digest: str


@dataclass(frozen=True)
class Memory:
    """Bytes on the device: planned by group, planned peak, and allocated peak. host: of offloaded activations."""

    groups: dict[str, int]
    peak: int
    peak_allocated: int
    host: int = 0


@dataclass(frozen=True)
class UsedDevice:
    """The device of a run. kind: discrete, integrated, software ... miscompiled: what it gets wrong, in sentences.
    units: what computes, in words; matrix units, if there are any, are used with the compute dtypes f16
        and bf16, which both round to f16 then.
    """

    name: str
    driver: str
    backend: str
    kind: str
    subgroup_size: int
    checked_shaders: bool
    miscompiled: list[str] = field(default_factory=list)
    units: str = ""


@dataclass(frozen=True)
class Environment:
    """Versions by package, operating system, device and command line."""

    versions: dict[str, str]
    platform: str
    device: UsedDevice
    command: list[str]


@dataclass(frozen=True, repr=False)
class RunRecord:
    """The contents of run.json for a run that has ended.

    Attributes:
        stop_reason: one of `ending.STOP_TEXT`. signal: name of the signal that interrupted the run, if any.
        damaged_log_lines: lines of log.jsonl that were dropped when the run was resumed.
        options: of the run. state: steps, tokens, seconds and losses.
        base_digest: of the base model's names, shapes and the edges of its shards; base_sha256: of all its values.
        adapter_sha256, init_adapter_sha256: of the adapter's weights, and of those that it started from.
        trainable_parameters: number of the adapter's parameters.
        warnings: sentences about rows that were not used as they are, too few steps, and a loss that rose.
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
    warnings: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """finished, stopped early, interrupted or failed."""
        return OUTCOMES.get(self.stop_reason, self.stop_reason)

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self.state.step

    @property
    def target_seconds(self) -> float | None:
        """The elapsed time that the run was to end at; None if its length was not a time."""
        return self.options.target_seconds

    @property
    def elapsed_seconds(self) -> float:
        """Seconds from the beginning of the first step to the end of the last one, with what lies between."""
        return self.state.elapsed_seconds

    @property
    def step_budget(self) -> int:
        """Planned steps; of a timed run, those that there was time for."""
        return self.state.total_steps

    @property
    def loss(self) -> float | None:
        """The training loss of the last step; None before the first."""
        return self.state.last_loss

    @property
    def eval_loss(self) -> float | None:
        """The last held-out loss; None without held-out rows."""
        return self.state.last_eval_loss

    @property
    def directory(self) -> Path:
        """The directory of the adapter."""
        return self.options.directory

    def to_json(self) -> dict[str, Any]:
        """The contents of run.json."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, facts: Any, path: Path = Path(RUN)) -> RunRecord:
        """Create the record from the contents of run.json; `path` is named in errors.

        Raises:
            NewerSchemaError: it is from a newer version. UserError: an option is invalid.
            ValueError: another value is missing or has the wrong type.
        """
        schema_of(facts, path)
        return typed(cls, facts)  # type: ignore[no-any-return]

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        """Read run.json from a run's directory.

        Raises:
            UserError: it is missing, damaged, from a newer version, or of an implementation that is not registered.
        """
        path = directory / RUN
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            check_registered(facts.get("options") if isinstance(facts, dict) else None, directory)
            return cls.from_json(facts, path)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(
                f"{directory} has no finished run (there is no {RUN}): give the {flag('output')} of one."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"The run in {directory} cannot be read: {error}.") from error

    def write(self, directory: Path) -> None:
        _write(directory / RUN, self.to_json())

    def __repr__(self) -> str:
        losses = {"loss": self.loss, "eval_loss": self.eval_loss}
        text = "".join(f", {name}={value:.4f}" for name, value in losses.items() if value is not None)
        return f"RunRecord(stop_reason={self.stop_reason!r}, steps={self.steps}{text}, output={self.options.output!r})"

    def __getitem__(self, name: str) -> Any:
        """Access by key, like the dict that version 0.1.0 returned; to be removed in the next version."""
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
    """The result of a pipeline's adapter; its directory, `checkpoint`, has a run.json with more."""

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
    warnings: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """finished, stopped early, interrupted or failed."""
        return OUTCOMES.get(self.stop_reason, self.stop_reason)


@dataclass(frozen=True, repr=False)
class PipelineRecord:
    """The contents of pipeline.json. options: common to all adapters. step: steps of the pipeline, by any adapter."""

    step: int
    signal: str | None
    schedule: str
    batch_tokens: int
    options: TrainingArguments
    adapters: list[AdapterRecord]
    memory: Memory
    environment: Environment

    @property
    def warnings(self) -> list[str]:
        """Those of all adapters, which `RunRecord.warnings` has."""
        return [f"{adapter.name}: {text}" for adapter in self.adapters for text in adapter.warnings]

    def to_json(self) -> dict[str, Any]:
        """The contents of pipeline.json."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, facts: Any, path: Path = Path(PIPELINE)) -> PipelineRecord:
        """Create the record from the contents of pipeline.json; raises as `RunRecord.from_json`."""
        if schema_of(facts, path) == 1:  # which has them among the options
            facts = {**facts, **_of_options(facts, "schedule", "batch_tokens")}
        return typed(cls, facts)  # type: ignore[no-any-return]

    def write(self, directory: Path) -> None:
        _write(directory / PIPELINE, self.to_json())

    def __repr__(self) -> str:
        adapters = ", ".join(f"{adapter.name}: {adapter.outcome}" for adapter in self.adapters)
        return f"PipelineRecord(steps={self.step}, {adapters})"


def check_registered(options: Any, directory: Path) -> None:
    """Raise UserError if the recorded options of a run select an implementation that is not registered here."""
    for option, (noun, registered) in REGISTERED.items():
        name = options.get(option) if isinstance(options, dict) else None
        if isinstance(name, str) and name not in registered:
            raise UserError(
                f"The run in {directory} was trained with {noun} {name!r:.80}, which is not registered here: the "
                f"registered ones are {', '.join(registered)}."
            )


def _of_options(facts: dict[str, Any], *names: str) -> dict[str, Any]:
    """The named options as separate facts, and the options without them."""
    options = facts.get("options")
    if not isinstance(options, dict):
        return {}
    values = {name: options[name] for name in names if name in options}
    return values | {"options": {name: value for name, value in options.items() if name not in values}}


def _write(path: Path, facts: dict[str, Any]) -> None:
    write_bytes_atomic(path, (to_json(facts, indent=1) + "\n").encode())
