"""The largest batch that fits: by the memory plan, then confirmed by training."""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from wgpu_lora.bench.results import header
from wgpu_lora.bench.step import ROW, WARMUP, TrainingStep, own_words
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.gpu.errors import DeviceError
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.names.naming import flag
from wgpu_lora.share import budget_bytes
from wgpu_lora.track.entry import run_name
from wgpu_lora.track.recording import device_facts, given_options, recorded
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.words import counted

SCHEMA = "wgpu-lora-bench-max-batch/1"
RUNS = 3  # timed steps per batch at most
DEVICE, REFUSED = "the device", "a refused allocation"
MOST, LIMIT = "the given maximum", "the given memory"
Record = dict[str, Any]
Planned = tuple[int, str, str | None]


@dataclass(frozen=True)
class Batches:
    """The batches to search.

    args: options of the training. most: maximum rows, None for as many as fit. limit: maximum bytes, instead of the
    device's memory. seconds: for running batches, with and without checkpointing each; larger batches are only planned.
    """

    args: TrainingArguments = field(default_factory=TrainingArguments)
    most: int | None = None
    limit: int | None = None
    seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, value in (("max_batch", self.most), ("memory_limit", self.limit)):
            if value is not None and value < 1:
                raise UserError(f"{flag(name)} must be at least 1, not {value}.")
        if not 0 < self.seconds < math.inf:
            raise UserError(f"{flag('time_limit')} is {self.seconds:g}: give a number of seconds greater than 0.")

    def of(self, rows: int, checkpointing: bool) -> TrainingArguments:
        """The options with this batch."""
        return replace(self.args, per_device_train_batch_size=rows, gradient_checkpointing=checkpointing)


def planned_batch(
    peak: Callable[[int], int], available: int | None, most: int | None = None, memory: str = "memory"
) -> Planned:
    """The most rows whose planned peak is available, 0 if not even one row fits.

    It doubles the rows, then bisects, so it plans at most twice as many as fit.

    Args:
        peak: rows -> bytes; raises UserError if a tensor exceeds the limits of the device.
        available: bytes; None if not known, and then only the limits of the device count.
        memory: the name of `available`.

    Returns:
        The rows, their bound (`memory`, MOST or DEVICE) and, if that is the device, its limit.
    """

    @cache
    def refusal(rows: int) -> tuple[str, str | None] | None:
        try:
            need = peak(rows)  # also if nothing is known of the memory, since it checks the device's limits
        except UserError as error:
            return DEVICE, _fact(error)
        return None if available is None or need <= available else (memory, None)

    fits, high = 0, 1
    while fits != most and not refusal(high):
        fits, high = high, min(2 * high, most or 2 * high)
    fits += bisect_left(range(fits + 1, high), True, key=lambda rows: refusal(rows) is not None)
    bound = None if fits == most else refusal(fits + 1)
    return fits, *(bound or (MOST, None))


def _fact(error: UserError) -> str:
    """The reason of a refusal; a device's without its advice, which names options of training runs."""
    return error.fact if isinstance(error, DeviceError) else str(error).rstrip(".")


def find_max_batch(model: LoadedModel, batches: Batches, events: Events = SILENT) -> Record:
    """Search with and without gradient checkpointing, then train a few steps at several batch sizes up to the largest.

    If the device refuses a batch that the plan allows (WebGPU does not report free memory), smaller ones are tried. A
    batch that would take too long is only planned.

    Returns:
        {"header": ..., "rows": [...], "summary": [...]}: a row for each batch that ran, a summary for each search.

    Raises:
        UserError: not even one row fits with gradient checkpointing; it names how many layers would.
    """
    available, args = budget_bytes(model.device.info, batches.limit).bytes, batches.args
    with own_words(ROW):
        TrainingStep.fitting(model, batches.of(1, True), batches.limit)
    work = {"model": model.name, "layers": model.config.num_hidden_layers, "base_dtype": model.decoder.base_dtype}
    work |= {"tokens": args.length, "rank": args.lora_r, "compute_dtype": args.compute_dtype}
    work |= {"max_batch": batches.most, "time_limit": batches.seconds}
    excluded = f"the first {WARMUP} steps of each batch, if there was time for more"
    found: Record = {"header": header(SCHEMA, model.device, work=work, available=available, excluded=excluded)}
    found |= {"rows": [], "summary": []}
    events.measured(found["header"])
    memory = "memory" if batches.limit is None else LIMIT
    name = run_name(model.decoder.base_dtype, True, False, "max-batch", args.compute_dtype)
    facts = {"device": device_facts(model.device.info), "config": given_options(work)}
    with recorded("bench max-batch", name, objective="max-batch", **facts) as entry:
        _search(model, batches, available, memory, events, found)
        entry["results"] = {"searches": found["summary"]}
    return found


def _search(
    model: LoadedModel, batches: Batches, available: int | None, memory: str, events: Events, found: Record
) -> None:
    """Search with and without gradient checkpointing, adding to the rows and summaries of `found`."""
    for way in (False, True):

        def peak(rows: int, way: bool = way) -> int:
            return TrainingStep(model, batches.of(rows, way)).session.memory().peak

        rows, summary = confirm(model, batches, planned_batch(peak, available, batches.most, memory), way, events)
        found["rows"] += rows
        found["summary"].append(summary)
        events.measured(summary)


def confirm(
    model: LoadedModel, batches: Batches, plan: Planned, checkpointing: bool, events: Events
) -> tuple[list[Record], Record]:
    """Run batches of increasing size, each of which predicts the time of the next.

    Returns:
        A record for each batch that ran, and the summary. `confirmed`: the most rows that ran, 0 if none did.
        `bounded_by`, `why`: of the plan, or of a device that refused less. `not_run`: why larger ones were not tried.
    """
    begin = time.perf_counter()
    ran: list[Record] = []
    most, bound, why = plan
    low, high, late = 0, most + 1, None
    while high - low > 1:
        # Twice as many each time; once the device has refused some, halfway.
        rows = min(2 * low or 1, most) if high > most else (low + high) // 2
        left = batches.seconds - (time.perf_counter() - begin)
        expected = rows / low * ran[-1]["step_seconds"] if ran else 0.0
        if expected > left:
            about = f"a step of {counted(rows, 'row')} would take about {expected:,.0f} s"
            late = f"{about}, and {max(left, 0):,.0f} s of the {batches.seconds:g} s were left"
            break
        try:
            ran.append(measure(model, batches, rows, checkpointing, left if rows == most else left / 2))
        except UserError as error:
            high, bound, why = rows, REFUSED, _fact(error)
            continue
        low = rows
        events.measured(ran[-1])
    summary = {"kind": "summary", "planned": most, "confirmed": low, "bounded_by": bound, "why": why}
    return ran, {**summary, "gradient_checkpointing": checkpointing, "not_run": late}


def measure(model: LoadedModel, batches: Batches, rows: int, checkpointing: bool, seconds: float) -> Record:
    """Time and memory of a batch: at least one step, and more if `seconds` allow.

    The first steps, which include compilation, only count if there was no time for others.
    """
    step, device = TrainingStep(model, batches.of(rows, checkpointing)), model.device
    model.load_weights()  # before the peak is reset: staging needs memory that training does not
    device.peak_allocated = device.allocated
    try:
        step.allocate()
        times = step.seconds(1)
        while len(times) < WARMUP + RUNS and sum(times) + times[-1] <= seconds:
            times += step.seconds(1)
        allocated = device.peak_allocated
    finally:
        step.close()
    timed = times[WARMUP:] or times[-1:]
    median = statistics.median(timed)
    return {
        "kind": "batch",
        "batch": rows,
        "gradient_checkpointing": checkpointing,
        "step_seconds": median,
        "runs": len(timed),
        "warmup": len(times) - len(timed),
        "tokens_per_second": step.tokens / median,
        "planned": step.session.memory().training,
        "allocated": allocated,
    }
