"""The largest batch that fits: asked of the memory plan, then confirmed by training on it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from wgpu_lora.bench.header import header
from wgpu_lora.bench.step import WARMUP, TrainingStep, check_fits, largest
from wgpu_lora.errors import UserError
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.share import budget_bytes

SCHEMA = "wgpu-lora-bench-max-batch/1"
MAX_BATCH = 64
Record = dict[str, Any]


@dataclass(frozen=True)
class Batches:
    """What is searched: rows of `tokens` tokens, at most `most` of them a batch.

    limit: bytes that may be used, where that is less than what the device has. runs: timed steps of a batch.
    """

    tokens: int = 512
    rank: int = 16
    most: int = MAX_BATCH
    limit: int | None = None
    runs: int = 3

    def __post_init__(self) -> None:
        for name, value in (("--max-batch", self.most), ("--memory-limit", self.limit), ("--runs", self.runs)):
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, not {value}.")

    def step(self, model: LoadedModel, rows: int, checkpointing: bool) -> TrainingStep:
        return TrainingStep(model, rows, self.tokens, self.rank, checkpointing)


def planned_batch(peak: Callable[[int], int], available: int | None, most: int) -> int:
    """The most rows, up to `most`, whose planned peak is available; 0 where not even one row fits.

    Args:
        peak: rows -> bytes; UserError where the device cannot bind or dispatch so much.
        available: bytes; None where nobody can tell, and then only what the device can bind counts.
    """

    def fits(rows: int) -> bool:
        need = peak(rows)  # asked for even where nothing is known, since it finds what cannot be bound
        return available is None or need <= available

    return largest(fits, most)


def find_max_batch(
    model: LoadedModel, batches: Batches, note: Callable[[Record], None] = lambda record: None
) -> Record:
    """Searches with and without gradient checkpointing, then trains a few steps at several batches up to the largest.

    Nothing is allocated before the search is over. Where the device refuses a batch that the plan allows (WebGPU does
    not say how much memory a discrete GPU has), smaller ones are tried.

    Returns:
        {"header": ..., "rows": [...], "summary": [...]}: a row for each batch that ran, a summary for each search.

    Raises:
        UserError: not even one row fits, even with gradient checkpointing; then with the layers that would.
    """
    available = budget_bytes(model.device.info, batches.limit).bytes
    check_fits(model, lambda of: _peak(of, batches, True, 1), batches.limit)
    work = {"model": model.name, "layers": model.config.num_hidden_layers, "base_dtype": model.decoder.base_dtype}
    work |= {"tokens": batches.tokens, "rank": batches.rank, "max_batch": batches.most}
    excluded = f"the first {WARMUP} steps of each batch"
    head = header(SCHEMA, model.device, work=work, available=available, excluded=excluded)
    note(head)
    rows: list[Record] = []
    summary: list[Record] = []
    planned = {
        way: planned_batch(partial(_peak, model, batches, way), available, batches.most) for way in (False, True)
    }
    for checkpointing, most in planned.items():
        found, ran = _confirmed(model, batches, most, checkpointing, note) if most else (0, [])
        rows += ran
        bound = "the device" if found < most else "memory" if most < batches.most else "--max-batch"
        result = {"planned": most, "confirmed": found, "bounded_by": bound}
        summary.append({"kind": "summary", "gradient_checkpointing": checkpointing, **result})
        note(summary[-1])
    return {"header": head, "rows": rows, "summary": summary}


def _peak(model: LoadedModel, batches: Batches, checkpointing: bool, rows: int) -> int:
    return batches.step(model, rows, checkpointing).session.memory().peak


def _confirmed(
    model: LoadedModel, batches: Batches, most: int, checkpointing: bool, note: Callable[[Record], None]
) -> tuple[int, list[Record]]:
    """The largest batch up to `most` that runs, and a row for it and for some below it, ascending."""
    ran: dict[int, Record] = {}

    def runs(rows: int) -> bool:
        ran[rows] = measure(model, batches, rows, checkpointing)
        note(ran[rows])
        return True

    found = largest(runs, most)
    for rows in below(found):
        if rows not in ran:
            runs(rows)
    return found, [ran[rows] for rows in sorted(ran)]


def below(most: int) -> list[int]:
    """Batches for a table that ends with `most`: a half, a quarter, an eighth, and one row."""
    return sorted({max(1, most >> shift) for shift in (1, 2, 3)} | {1} if most else set())


def measure(model: LoadedModel, batches: Batches, rows: int, checkpointing: bool) -> Record:
    """A few steps of one batch: its seconds, and the memory it was planned to take and took."""
    step = batches.step(model, rows, checkpointing)
    device = model.device
    model.load_weights()  # takes room for staging, which training does not need
    device.peak_allocated = device.allocated
    try:
        step.allocate()
        seconds = step.seconds(batches.runs, WARMUP)
        allocated = device.peak_allocated
    finally:
        step.close()
    median = statistics.median(seconds)
    memory = step.session.memory()
    return {
        "kind": "batch",
        "batch": rows,
        "gradient_checkpointing": checkpointing,
        "step_seconds": median,
        "runs": len(seconds),
        "tokens_per_second": rows * batches.tokens / median,
        "planned": memory.training,
        "allocated": allocated,
    }
