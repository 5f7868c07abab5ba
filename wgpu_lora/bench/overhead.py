"""What protected training costs: a row is two segments of the same training, raw and protected, and its overhead.

Rows have the fields of published ones, in camelCase in files.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.typed_json import typed
from wgpu_lora.words import count_noun

RAW_FIRST, PROTECTED_FIRST = ORDERS = ("raw-first", "protected-first")
VERIFIED, ZEROIZED = "verified", "zeroized"
TARGET = "target seconds"  # the stop reason of a segment that ended with its time
ROUNDED = 0.006  # published overheads have two digits
MEASURED = ("elapsed_sec", "steps", "final_loss", "adapter_sha256", "step_budget", "stop_reason", "outside_sec")


@dataclass(frozen=True)
class Segment:
    """One of a row's two trainings.

    target_sec: asked for. elapsed_sec: from the begin of the first step to the end of the last. step_budget: the last
    estimate of the steps that fit into the target. outside_sec: seconds of the whole segment that are not counted.
    """

    target_sec: float
    elapsed_sec: float
    steps: int
    step_budget: int | None
    stop_reason: str
    final_loss: float | None
    adapter_sha256: str
    outside_sec: float | None = None


@dataclass(frozen=True)
class Row:
    """A row of a result file; its fields are named in camelCase there. None: not known, as in published rows.

    The second group of fields is not in published rows. protection_sec: of the protected segment's time, for sealing,
    log lines and reports, without deducting what the raw one takes to save. equal_digests: why both adapters are the
    same; None if they are not, or if there is no reason. not_clean: the reasons why clean_model_artifact is false.
    """

    label: str
    model: str
    overhead_pct: float
    gpu_model: str | None = None
    order: str | None = None
    target_sec: float | None = None
    raw_elapsed_sec: float | None = None
    protected_elapsed_sec: float | None = None
    raw_steps: int | None = None
    protected_steps: int | None = None
    raw_final_loss: float | None = None
    protected_final_loss: float | None = None
    raw_adapter_sha256: str | None = None
    protected_adapter_sha256: str | None = None
    attestation: str | None = None
    runtime_state: str | None = None
    clean_model_artifact: bool | None = None
    total_params: int | None = None
    trainable_adapter_params: int | None = None
    stability_settings: dict[str, Any] | None = None

    raw_step_budget: int | None = None
    protected_step_budget: int | None = None
    raw_stop_reason: str | None = None
    protected_stop_reason: str | None = None
    raw_outside_sec: float | None = None
    protected_outside_sec: float | None = None
    protection_sec: float | None = None
    initial_adapter_sha256: str | None = None
    equal_digests: str | None = None
    not_clean: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {_camel(item.name): getattr(self, item.name) for item in fields(self)}

    @classmethod
    def of_json(cls, value: Any) -> Row:
        """Raises ValueError if it is no row, or its overhead is not that of its figures."""
        names = {_camel(item.name): item.name for item in fields(cls)}
        found = typed(dict[str, Any], value, "a row")
        row = typed(cls, {names[name]: item for name, item in found.items() if name in names})
        figures = (row.raw_steps, row.raw_elapsed_sec, row.protected_steps, row.protected_elapsed_sec)
        if all(figure is not None for figure in figures):
            again = overhead_pct(*figures)
            if abs(again - row.overhead_pct) > ROUNDED:
                raise ValueError(f"'overheadPct' is {row.overhead_pct:g}, but its figures give {again:.2f}")
        return row


def _camel(name: str) -> str:
    return re.sub("_([a-z0-9])", lambda found: found[1].upper(), name)


def overhead_pct(raw_steps: int, raw_sec: float, protected_steps: int, protected_sec: float) -> float:
    """100 (1 - (protected steps / protected seconds) / (raw steps / raw seconds)).

    Raises:
        ValueError: a segment has no step, or no time.
    """
    if min(raw_steps, protected_steps) < 1 or not all(0 < seconds < math.inf for seconds in (raw_sec, protected_sec)):
        raise ValueError("a segment has no step or no time")
    return 100 * (1 - (protected_steps / protected_sec) / (raw_steps / raw_sec))


def row_of(raw: Segment, protected: Segment, *, attestation: str, runtime_state: str, **facts: Any) -> Row:
    """The row of two segments.

    Args:
        attestation: VERIFIED, or what was found instead. runtime_state: ZEROIZED, or what was found instead.
        facts: other fields of the row: label, model, order and so on.

    Raises:
        UserError: a segment was too short to measure.
    """
    try:
        overhead = overhead_pct(raw.steps, raw.elapsed_sec, protected.steps, protected.elapsed_sec)
    except ValueError:
        raise UserError(
            f"A segment had {count_noun(min(raw.steps, protected.steps), 'step')}, which is too short to measure: "
            "give a "
            "longer --target-seconds."
        ) from None
    equal = equal_digests(raw, protected)
    reasons = defects(raw, protected, facts.get("initial_adapter_sha256"), attestation, runtime_state)
    both = {
        f"{side}_{name}": getattr(segment, name)
        for side, segment in (("raw", raw), ("protected", protected))
        for name in MEASURED
    }
    return Row(
        overhead_pct=overhead,
        target_sec=raw.target_sec,
        attestation=attestation,
        runtime_state=runtime_state,
        clean_model_artifact=not reasons,
        equal_digests=equal,
        not_clean=reasons,
        **both,
        **facts,
    )


def equal_digests(raw: Segment, protected: Segment) -> str | None:
    """Why both segments have the same adapter; None if they have not, or if there is no reason for it."""
    if raw.adapter_sha256 != protected.adapter_sha256 or raw.steps != protected.steps:
        return None
    return (
        f"both segments took {count_noun(raw.steps, 'step')} on the same rows with the same seed, and a step has the "
        "same "
        "bits every time"
    )


def defects(raw: Segment, protected: Segment, initial: str | None, attestation: str, runtime_state: str) -> list[str]:
    """The reasons why a row proves nothing about a trained model; empty for a clean row.

    Args:
        initial: SHA-256 of the adapter that both segments began with.
    """
    found = []
    if attestation != VERIFIED:
        found.append(f"the attestation is {attestation}")
    if runtime_state != ZEROIZED:
        found.append(f"the state of the protected run is {runtime_state}")
    if raw.target_sec != protected.target_sec:
        found.append("the segments have different targets")
    for name, segment in (("raw", raw), ("protected", protected)):
        if segment.final_loss is None or not math.isfinite(segment.final_loss):
            found.append(f"the final loss of the {name} segment is not finite")
        if segment.stop_reason != TARGET:
            found.append(f"the {name} segment ended before its target ({segment.stop_reason})")
        if not initial:
            found.append(f"the adapter that the {name} segment began with is not known")
        elif segment.adapter_sha256 == initial:
            found.append(f"the adapter of the {name} segment is the initial one")
    if raw.adapter_sha256 == protected.adapter_sha256 and not equal_digests(raw, protected):
        found.append("both adapters are the same after different numbers of steps")
    return found
