"""The largest batch that fits: asked of the memory plan, then confirmed by training on it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from wgpu_lora.bench.results import header
from wgpu_lora.bench.step import ROW, WARMUP, TrainingStep, own_words, search
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.gpu.errors import DeviceError
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.models.targets import ALL
from wgpu_lora.share import budget_bytes
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.words import counted

SCHEMA = "wgpu-lora-bench-max-batch/1"
SECONDS = 600.0  # of running batches, in each way
DEVICE, REFUSED = "the device", "an allocation that was refused"
Record = dict[str, Any]


@dataclass(frozen=True)
class Batches:
    """What is searched: rows of `tokens` tokens, and no more than `most` of them a batch where that is given.

    limit: bytes that may be used, instead of what the device has. seconds: of running batches, with and without
    checkpointing each; past them, what is left is planned alone. runs: timed steps of a batch, at most.
    """

    tokens: int = 512
    rank: int = 16
    compute_dtype: str = "f32"
    most: int | None = None
    limit: int | None = None
    seconds: float = SECONDS
    runs: int = 3

    def __post_init__(self) -> None:
        for name, value in (("--max-batch", self.most), ("--memory-limit", self.limit), ("--runs", self.runs)):
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, not {value}.")
        if not 0 < self.seconds < math.inf:
            raise UserError(f"--time-limit is {self.seconds:g}: give a number of seconds greater than 0.")
        with own_words(ROW):  # refuses what no run can have
            TrainingArguments(compute_dtype=self.compute_dtype, lora_r=self.rank)

    def step(self, model: LoadedModel, rows: int, checkpointing: bool) -> TrainingStep:
        return TrainingStep(model, *self.sizes(rows, checkpointing))

    def sizes(self, rows: int, checkpointing: bool) -> tuple[Any, ...]:
        return rows, self.tokens, self.rank, checkpointing, ALL, self.compute_dtype


@dataclass(frozen=True)
class Planned:
    """The most rows that a plan allows, and what bounds them: memory, --memory-limit, --max-batch or the device.

    why: what the device cannot do, where that is the bound.
    """

    rows: int
    bound: str
    why: str | None = None


def planned_batch(
    peak: Callable[[int], int], available: int | None, most: int | None = None, memory: str = "memory"
) -> Planned:
    """The most rows whose planned peak is available; 0 where not even one row fits.

    Args:
        peak: rows -> bytes; UserError where the device cannot bind or dispatch so much.
        available: bytes; None where nobody can tell, and then only what the device can bind counts.
        memory: what `available` is called.
    """

    def refusal(rows: int) -> tuple[str, str | None] | None:
        try:
            need = peak(rows)  # asked for even where nothing is known, since it finds what cannot be bound
        except UserError as error:
            return DEVICE, _fact(error)
        return None if available is None or need <= available else (memory, None)

    rows, bound = search(refusal, most)
    return Planned(rows, *(bound or ("--max-batch", None)))


def _fact(error: UserError) -> str:
    """What a plan refuses; a device's refusal without its advice, which names a training run's options."""
    return error.fact if isinstance(error, DeviceError) else str(error).rstrip(".")


def find_max_batch(model: LoadedModel, batches: Batches, events: Events = SILENT) -> Record:
    """Searches with and without gradient checkpointing, then trains a few steps at several batches up to the largest.

    Nothing is allocated before the search is over. Where a batch that the plan allows is refused (WebGPU does not say
    how much memory a discrete GPU has), smaller ones are tried. One that would take too long is planned alone.

    Returns:
        {"header": ..., "rows": [...], "summary": [...]}: a row for each batch that ran, a summary for each search.

    Raises:
        UserError: not even one row fits, even with gradient checkpointing; then with the layers that would.
    """
    available = budget_bytes(model.device.info, batches.limit).bytes
    with own_words(ROW):
        TrainingStep.fitting(model, *batches.sizes(1, True), limit=batches.limit)
    work = {"model": model.name, "layers": model.config.num_hidden_layers, "base_dtype": model.decoder.base_dtype}
    work |= {"tokens": batches.tokens, "rank": batches.rank, "compute_dtype": batches.compute_dtype}
    work |= {"max_batch": batches.most, "time_limit": batches.seconds}
    excluded = f"the first {WARMUP} steps of each batch, where there was time for more"
    head = header(SCHEMA, model.device, work=work, available=available, excluded=excluded)
    events.measured(head)
    memory = "memory" if batches.limit is None else "--memory-limit"
    planned = {
        way: planned_batch(partial(_peak, model, batches, way), available, batches.most, memory)
        for way in (False, True)
    }
    found: dict[str, list[Record]] = {"rows": [], "summary": []}
    for checkpointing, plan in planned.items():
        rows, summary = confirm(model, batches, plan, checkpointing, events)
        found["rows"] += rows
        found["summary"].append(summary)
        events.measured(summary)
    return {"header": head, **found}


def _peak(model: LoadedModel, batches: Batches, checkpointing: bool, rows: int) -> int:
    return batches.step(model, rows, checkpointing).session.memory().peak


def confirm(
    model: LoadedModel, batches: Batches, plan: Planned, checkpointing: bool, events: Events
) -> tuple[list[Record], Record]:
    """Runs ascending batches, each of which says about how long a step of the next will take.

    Returns:
        A record for each batch that ran, and the summary. `confirmed`: the most rows that ran, 0 where none did.
        `bounded_by`, `why`: of the plan, or of a device that refused less. `not_run`: why a larger one was not tried.
    """
    begin = time.perf_counter()
    ran: dict[int, Record] = {}
    low, high, bound, why, late = 0, plan.rows + 1, plan.bound, plan.why, None
    while high - low > 1 and not late:
        ahead = [rows for rows in leading_to(plan.rows) if low < rows < high] or [(low + high) // 2]
        rows, left = ahead[0], batches.seconds - (time.perf_counter() - begin)
        expected = rows / low * ran[low]["step_seconds"] if low else 0.0
        if ran and expected > left:
            about = f"a step of {counted(rows, 'row')} would take about {expected:,.0f} s"
            late = f"{about}, and {max(left, 0):,.0f} s of --time-limit {batches.seconds:g} were left"
            continue
        try:
            ran[rows] = measure(model, batches, rows, checkpointing, left / len(ahead))
        except UserError as error:
            high, bound, why = rows, REFUSED, _fact(error)
            continue
        low = rows
        events.measured(ran[rows])
    summary = {"kind": "summary", "planned": plan.rows, "confirmed": low, "bounded_by": bound, "why": why}
    return list(ran.values()), {**summary, "gradient_checkpointing": checkpointing, "not_run": late}


def leading_to(most: int) -> list[int]:
    """Batches for a table that ends with `most`: one row, each eight times the last or less, a quarter and a half."""
    shifts = (0, 1, 2, *range(3, most.bit_length(), 3))
    return sorted({1, *(max(1, most >> shift) for shift in shifts)}) if most else []


def measure(model: LoadedModel, batches: Batches, rows: int, checkpointing: bool, seconds: float) -> Record:
    """A few steps of one batch, one at least and further ones as `seconds` allow: their time, and their memory.

    The first steps, which compile, count only where there was no time for others.
    """
    step, device = batches.step(model, rows, checkpointing), model.device
    model.load_weights()  # takes room for staging, which training does not need
    device.peak_allocated = device.allocated
    try:
        step.allocate()
        times = step.seconds(1)
        while len(times) < WARMUP + batches.runs and sum(times) + times[-1] <= seconds:
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
        "tokens_per_second": rows * batches.tokens / median,
        "planned": step.session.memory().training,
        "allocated": allocated,
    }
