"""The state of a slot's run, and state.json, which stores it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import parse_object
from wgpu_lora.files.typed_json import Count, FromJson, Seconds, typed
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.checkpoint_store import PLAIN_FILES, CheckpointStore

STATE = "state.json"
MAX_STATE_BYTES, MAX_STATE_PARTS = 256 << 20, 16 << 20  # it has a loss for every step since the last log line


@dataclass
class RunState:
    """All state of a run that is not on the device."""

    step: Count = 0
    epoch: Count = 0
    index: Count = 0  # of the next step within the epoch
    total_steps: Count = 0
    schedule_start: Count = 0  # step at which the learning-rate schedule starts
    tokens: Count = 0  # trained tokens
    processed_tokens: Count = 0  # all tokens, prompts included
    seconds: Seconds = 0.0  # of steps and held-out losses; if slots share a step, this slot's share
    elapsed_seconds: Seconds = (
        0.0  # from the first step's beginning to the last one's end (train/loop/slot_progress.py)
    )
    step_seconds: Seconds = 0.0  # of a recent step; 0 until one was timed
    # With --target-seconds:
    calibrated: bool = False  # whether total_steps is an estimate from timed steps, and not a guess
    warming_seconds: Seconds = 0.0  # of warm-up so far
    warmed_seconds: Seconds | None = None  # elapsed_seconds at the end of the warm-up
    warmed_step: Count = 0
    between_seconds: dict[str, Seconds] = field(
        default_factory=dict
    )  # of held-out losses and checkpoints, the last time
    ending: bool = False  # whether the last steps, if the trained weights have any, have begun
    unrounded_eval_loss: float | None = None  # of the model before it was rounded (train/objective_eval.py)
    first_eval_loss: float | None = None  # before the first step
    best_eval_loss: float | None = None
    best_step: Count = 0
    last_loss: float | None = None
    last_eval_loss: float | None = None
    postponed: list[dict[str, float]] = field(default_factory=list)  # a step whose held-out loss is due (`postpone`)
    # Chosen tilings of heavy calls. Another tiling rounds differently, so a resumed run keeps them.
    tiles: dict[str, Annotated[Tiling, FromJson()]] = field(default_factory=dict)
    pending: list[float] = field(default_factory=list)  # losses of the steps since the last log line
    pending_tokens: Count = 0
    pending_processed_tokens: Count = 0
    pending_seconds: Seconds = 0.0

    @property
    def trained_eval_loss(self) -> float | None:
        """The last held-out loss after a step; None if only the one before the first step was measured."""
        return None if self.best_eval_loss is None else self.last_eval_loss


def read_state(directory: Path, storage: CheckpointStore = PLAIN_FILES) -> tuple[RunState, dict[str, Any]]:
    """Read a checkpoint's state, and the identity of the run that wrote it.

    Raises:
        UserError: state.json is missing, not a JSON object, or from a newer version.
        ValueError: a field is missing, unknown or invalid.
    """
    data = storage.read(directory / STATE, MAX_STATE_BYTES)
    facts = parse_object(data, str(directory / STATE), MAX_STATE_BYTES, MAX_STATE_PARTS)
    schema = schema_of(facts, directory / STATE)
    state, identity = facts.get("state"), facts.get("identity")
    if isinstance(state, dict) and schema < SCHEMA:
        state = _of_today(state)
    try:
        read: RunState = typed(RunState, state, "'state'", unknown="refuse")
    except ValueError as error:
        raise ValueError(f"{STATE}: {error}".removesuffix(".")) from None
    lacking = {field.name for field in fields(RunState)} - set(state or ())
    if lacking and schema == SCHEMA:
        raise ValueError(f"'state' in {STATE} lacks {min(lacking)}")
    if not _is_identity(identity):
        raise ValueError(f"'identity' in {STATE} is invalid")
    assert isinstance(identity, dict)
    return read, identity


def _of_today(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an earlier version, which counted time by steps and held-out losses."""
    seconds = state.get("seconds", 0.0)
    times = {"elapsed_seconds": seconds, "warming_seconds": seconds}
    return times | {name: value for name, value in state.items() if name != "heldout_seconds"}


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return type(value) in (int, float) and abs(value) <= 1e308 and math.isfinite(value)


def _is_identity(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("options"), dict)
        and all(isinstance(value.get(name), str) for name in ("data", "base", "config"))
        and isinstance(value.get("weights"), str | None)
    )


def step_budget(state: RunState, args: TrainingArguments, step_seconds: float) -> int:
    """The total steps of a timed run whose remaining ones take `each` seconds."""
    assert args.target_seconds
    seconds_left = max(0.0, args.target_seconds - state.elapsed_seconds)
    total = min(state.step + round(seconds_left / max(step_seconds, 1e-9)), MOST)
    return min(total, args.max_steps) if args.max_steps > 0 else total


MOST = 1 << 52  # steps, which a run's state can hold; an estimate for an endless time would be more


SCHEMA = 5


class NewerSchemaError(UserError):
    """A file from a newer version, which must not be treated as damaged."""


def schema_of(facts: Any, path: Path) -> int:
    """The schema of a file's JSON.

    Raises:
        NewerSchemaError: it is newer than this version. ValueError: it is invalid.
    """
    if not isinstance(facts, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    result = facts.get("schema", 1)
    if type(result) is not int or result < 1:
        raise ValueError(f"the schema of {path.name} is {result!r:.40}")
    if result > SCHEMA:
        raise NewerSchemaError(
            f"{path} was written by a newer version of wgpu-lora (schema {result}, and this version reads up to "
            f"{SCHEMA}): update wgpu-lora."
        )
    return result
