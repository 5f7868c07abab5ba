"""The state of a slot's run, and state.json, which stores it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from wgpu_lora.bounded import parse_object
from wgpu_lora.gpu.choices import choices_from_json
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.train.schema import SCHEMA, schema_of
from wgpu_lora.train.storage import PLAIN, Storage
from wgpu_lora.typed_json import FromJson

STATE = "state.json"
MAX_STATE_BYTES, MAX_STATE_PARTS = 256 << 20, 16 << 20  # it has a loss for every step since the last log line


@dataclass
class RunState:
    """All state of a run that is not on the device."""

    step: int = 0
    epoch: int = 0
    index: int = 0  # of the next step within the epoch
    total_steps: int = 0
    tokens: int = 0  # trained tokens
    processed_tokens: int = 0  # all tokens, prompts included
    seconds: float = 0.0  # of steps and held-out losses; if slots share a step, this slot's share
    elapsed_seconds: float = 0.0  # from the first step's beginning to the last one's end (train/clock.py)
    step_seconds: float = 0.0  # of a recent step; 0 until one was timed
    # With --target-seconds:
    calibrated: bool = False  # whether total_steps is an estimate from timed steps, and not a guess
    warming_seconds: float = 0.0  # of warm-up so far
    warmed_seconds: float | None = None  # elapsed_seconds at the end of the warm-up
    warmed_step: int = 0
    between_seconds: dict[str, float] = field(default_factory=dict)  # of held-out losses and checkpoints, the last time
    ending: bool = False  # whether the last steps, if the subject has any, have begun
    unrounded_eval_loss: float | None = None  # of the model before it was rounded (train/unrounded.py)
    first_eval_loss: float | None = None  # before the first step
    best_eval_loss: float | None = None
    best_step: int = 0
    last_loss: float | None = None
    last_eval_loss: float | None = None
    # Chosen tilings of heavy calls. Another tiling rounds differently, so a resumed run keeps them.
    tiles: dict[str, Annotated[Tiling, FromJson()]] = field(default_factory=dict)
    pending: list[float] = field(default_factory=list)  # losses of the steps since the last log line
    pending_tokens: int = 0
    pending_processed_tokens: int = 0
    pending_seconds: float = 0.0


def read_state(directory: Path, storage: Storage = PLAIN) -> tuple[RunState, dict[str, Any]]:
    """Read a checkpoint's state, and the identity of the run that wrote it.

    Raises:
        UserError: state.json is missing, not a JSON object, or from a newer version.
        ValueError: a field is missing, unknown or invalid.
    """
    data = storage.read(directory / STATE, MAX_STATE_BYTES)
    facts = parse_object(data, str(directory / STATE), MAX_STATE_BYTES, MAX_STATE_PARTS)
    schema = schema_of(facts, directory / STATE)
    state, identity = facts.get("state"), facts.get("identity")
    known = {f.name for f in fields(RunState)}
    if isinstance(state, dict) and schema < SCHEMA:
        state = _of_today(state)
    if not isinstance(state, dict) or not (set(state) <= known if schema < SCHEMA else set(state) == known):
        raise ValueError(f"the fields of 'state' in {STATE} are invalid")
    if not _is_identity(identity):
        raise ValueError(f"'identity' in {STATE} is invalid")
    assert isinstance(identity, dict)
    for name, value in state.items():
        if not _RULES[name](value):
            raise ValueError(f"{name} in {STATE} is {value!r:.40}")
    return RunState(**state | {"tiles": choices_from_json(state.get("tiles", {}))}), identity


def _of_today(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an earlier version, which counted time by steps and held-out losses."""
    spent = state.get("seconds", 0.0)
    times = {"elapsed_seconds": spent, "warming_seconds": spent}
    return times | {name: value for name, value in state.items() if name != "heldout_seconds"}


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return type(value) in (int, float) and abs(value) <= 1e308 and math.isfinite(value)


def _is_seconds(value: Any) -> bool:
    return is_number(value) and value >= 0


def _is_loss(value: Any) -> bool:
    return value is None or is_number(value)


def _is_losses(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


def _is_times(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_seconds, value.values()))


def _is_tiles(value: Any) -> bool:
    try:
        choices_from_json(value)
    except ValueError:
        return False
    return True


def _is_identity(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("options"), dict)
        and all(isinstance(value.get(name), str) for name in ("data", "base", "config"))
        and isinstance(value.get("weights"), str | None)
    )


_RULES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "epoch", "index", "total_steps", "best_step", "warmed_step"), is_count),
    **dict.fromkeys(("tokens", "processed_tokens", "pending_tokens", "pending_processed_tokens"), is_count),
    **dict.fromkeys(("seconds", "elapsed_seconds", "step_seconds", "warming_seconds", "pending_seconds"), _is_seconds),
    **dict.fromkeys(
        ("unrounded_eval_loss", "first_eval_loss", "best_eval_loss", "last_loss", "last_eval_loss"), _is_loss
    ),
    "warmed_seconds": lambda value: value is None or _is_seconds(value),
    **dict.fromkeys(("calibrated", "ending"), lambda value: isinstance(value, bool)),
    "between_seconds": _is_times,
    "tiles": _is_tiles,
    "pending": _is_losses,
}
