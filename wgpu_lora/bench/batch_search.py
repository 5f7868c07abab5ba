"""The largest batch that fits, by the memory plan and then confirmed by training, and the fastest of those that ran."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from wgpu_lora.bench.brick_results import header
from wgpu_lora.bench.timing import run_seconds
from wgpu_lora.bench.training_runs import Work, header_of, prepared, recording, time_run
from wgpu_lora.bench.training_step import ROW, TRAINING, WARMUP, TrainingStep, benchmark_option_names
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import DeviceError
from wgpu_lora.gpu.memory_leases import budget_bytes
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.job import Job
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.track.run_log import run_name
from wgpu_lora.train.track.run_recorder import device_facts, given_options, note_failure, recorded

SCHEMA = "wgpu-lora-bench-max-batch/2"
OK, MAX, OOM = "OK", "MAX", "OOM"  # a batch ran; it is the largest that does; it does not fit
RUNS = 3  # timed steps per batch at most
DEVICE, REFUSED = "the device", "a refused allocation"
MOST, LIMIT = "the given maximum", "the given memory"
Record = dict[str, Any]
Planned = tuple[int, str, str | None]


@dataclass(frozen=True)
class Batches:
    """The batches to search.

    args: options of the training. max_rows: None for as many as fit. sizes: the rows to try instead. limit: maximum
    bytes, instead of the device's memory. seconds: for running batches, with and without checkpointing each;
    larger batches are only planned.
    """

    args: TrainingArguments = field(default_factory=TrainingArguments)
    max_rows: int | None = None
    limit: int | None = None
    seconds: float = 600.0
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.sizes and self.max_rows is not None:
            raise UserError(f"{flag('batch_sizes')} and {flag('max_batch')} are both given: leave one of them out.")
        if self.sizes and min(self.sizes) < 1:
            raise UserError(f"{flag('batch_sizes')} must be at least 1 row each, not {min(self.sizes)}.")
        for name, value in (("max_batch", self.max_rows), ("memory_limit", self.limit)):
            if value is not None and value < 1:
                raise UserError(f"{flag(name)} must be at least 1, not {value}.")
        if not 0 < self.seconds < math.inf:
            raise UserError(f"{flag('time_limit')} is {self.seconds:g}: give a number of seconds greater than 0.")

    def of(self, rows: int, checkpointing: bool) -> TrainingArguments:
        """The options with this batch."""
        return replace(self.args, per_device_train_batch_size=rows, gradient_checkpointing=checkpointing)


def planned_batch(
    peak: Callable[[int], int], available: int | None, max_rows: int | None = None, memory: str = "memory"
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
    while fits != max_rows and not refusal(high):
        fits, high = high, min(2 * high, max_rows or 2 * high)
    fits += bisect_left(range(fits + 1, high), True, key=lambda rows: refusal(rows) is not None)
    bound = None if fits == max_rows else refusal(fits + 1)
    return fits, *(bound or (MOST, None))


def _fact(error: UserError) -> str:
    """The reason of a refusal; a device's without its advice, which names options of training runs."""
    return error.fact if isinstance(error, DeviceError) else str(error).rstrip(".")


def find_max_batch(model: LoadedModel, batches: Batches, events: Events = SILENT) -> Record:
    """Search with and without gradient checkpointing, then train a few steps at several batch sizes up to the largest.

    If the device refuses a batch that the plan allows (WebGPU does not report free memory), smaller ones are tried. A
    batch that would take too long is only planned.

    Returns:
        {"header": ..., "rows": [...], "summary": [...], "best": ...}: a row for each batch that ran or was refused, a
        summary for each search, and `best` of the rows.

    Raises:
        UserError: not even one row fits with gradient checkpointing; it names how many layers would.
    """
    available, args = budget_bytes(model.device.info, batches.limit).bytes, batches.args
    with benchmark_option_names(ROW):
        TrainingStep.fitting(model, batches.of(1, True), batches.limit)
    work = {"model": model.name, "layers": model.config.num_hidden_layers, "base_dtype": model.decoder.base_dtype}
    work |= {"tokens": args.length, "rank": args.lora_r, "compute_dtype": args.compute_dtype}
    work |= {"max_batch": batches.max_rows, "batch_sizes": [*batches.sizes], "time_limit": batches.seconds}
    excluded = f"the first {WARMUP} steps of each batch, if there was time for more"
    result: Record = {"header": header(SCHEMA, model.device, work=work, available=available, excluded=excluded)}
    result |= {"rows": [], "summary": []}
    events.measured(result["header"])
    memory = "memory" if batches.limit is None else LIMIT
    name = run_name(model.name, model.decoder.base_dtype, True, False, "max-batch", args.compute_dtype)
    facts = {"device": device_facts(model.device.info), "config": given_options(work)}
    with recorded("bench max-batch", name, objective="max-batch", **facts) as entry:
        _search(model, batches, available, memory, events, result)
        result["best"] = best(result["rows"])
        events.measured(result["best"])
        entry["results"] = {"searches": result["summary"], "best": result["best"]}
    return result


def _search(
    model: LoadedModel, batches: Batches, available: int | None, memory: str, events: Events, record: Record
) -> None:
    """Search with and without gradient checkpointing, adding to the rows and summaries of `record`."""
    for way in (False, True):

        def peak(rows: int, way: bool = way) -> int:
            return TrainingStep(model, batches.of(rows, way)).session.memory().peak_device_bytes

        plan = planned_batch(peak, available, max(batches.sizes, default=batches.max_rows), memory)
        also = [summary["confirmed"] for summary in record["summary"]]  # so that both ways have rows in common
        rows, summary = time_batches(model, batches, plan, way, events, also)
        record["rows"] += rows
        record["summary"].append(summary)
        events.measured(summary)


def time_batches(
    model: LoadedModel, batches: Batches, plan: Planned, checkpointing: bool, events: Events, also: Sequence[int] = ()
) -> tuple[list[Record], Record]:
    """Run batches of increasing size, each of which predicts the time of the next.

    Args:
        also: sizes to run besides, if they fit.

    Returns:
        A record for each batch that ran or was refused, and the summary. `confirmed`: the most rows that ran, 0 if none
        did. `bounded_by`, `why`: of the plan, or of a device that refused less. `not_run`: why larger ones were not
        tried.
    """
    begin = time.perf_counter()
    max_rows, bound, why = plan
    if batches.sizes:
        max_rows = max((size for size in batches.sizes if size <= max_rows), default=0)
    low, high, time_note = 0, None, None
    records: list[Record] = []
    refusals: list[Record] = []

    def refuse(rows: int, reason: str | None) -> None:
        planned_bytes = _planned_bytes(model, batches, rows, checkpointing)
        refusals.append(_row(rows, checkpointing) | {"planned": planned_bytes, "status": OOM, "why": reason})
        events.measured(refusals[-1])

    while (rows := _following(batches, low, high, max_rows, also)) is not None:
        seconds_left = batches.seconds - (time.perf_counter() - begin)
        expected = rows / low * records[-1]["step_seconds"] if records else 0.0
        if expected > seconds_left:
            about = f"a step of {count_noun(rows, 'row')} would take about {expected:,.0f} s"
            time_note = f"{about}, and {max(seconds_left, 0):,.0f} s of the {batches.seconds:g} s were left"
            break
        try:
            seconds = seconds_left if rows == max_rows else seconds_left / 2
            records.append(measure(model, batches, rows, checkpointing, seconds))
        except UserError as error:
            high, bound, why = rows, REFUSED, _fact(error)
            refuse(rows, why)
            continue
        low = rows
        records[-1]["status"] = OK
        events.measured(records[-1])
    if high is None:
        for rows in batches.sizes or (max_rows + 1,) * (bound != MOST):
            if rows > max_rows:
                refuse(rows, why or f"more than {bound}")
    if records and refusals and time_note is None:
        records[-1]["status"] = MAX
    summary = {"kind": "summary", "planned": max_rows, "confirmed": low, "bounded_by": bound, "why": why}
    rows_found = sorted([*records, *refusals], key=lambda row: row["batch"])
    return rows_found, {**summary, "gradient_checkpointing": checkpointing, "not_run": time_note}


def _following(batches: Batches, low: int, high: int | None, max_rows: int, also: Sequence[int]) -> int | None:
    """The next batch: twice as many rows, or the next of the given ones; once the device has refused some, halfway."""
    if high is not None:
        return None if batches.sizes or high - low < 2 else (low + high) // 2
    sizes = batches.sizes or (min(2 * low or 1, max_rows), *also)
    return min((size for size in sizes if low < size <= max_rows), default=None)


def _row(rows: int, checkpointing: bool) -> Record:
    """The record of a batch that did not run."""
    names = ("step_seconds", "runs", "warmup", "tokens_per_second", "loss", "planned", "allocated")
    return {"kind": "batch", "batch": rows, "gradient_checkpointing": checkpointing, **dict.fromkeys(names)}


def _planned_bytes(model: LoadedModel, batches: Batches, rows: int, checkpointing: bool) -> int | None:
    """None if a tensor exceeds the limits of the device."""
    try:
        return TrainingStep(model, batches.of(rows, checkpointing)).session.memory().training
    except UserError:
        return None


def measure(model: LoadedModel, batches: Batches, rows: int, checkpointing: bool, seconds: float) -> Record:
    """Time, memory and loss of a batch: at least one step, and more if `seconds` allow. The loss is the last step's.

    The first steps, which include compilation, only count if there was no time for others.
    """
    step, device = TrainingStep(model, batches.of(rows, checkpointing)), model.device
    model.load_weights()  # before the peak is reset: staging needs memory that training does not
    device.peak_allocated = device.allocated
    losses: list[float] = []
    times: list[float] = []
    try:
        step.allocate()
        while not times or (len(times) < WARMUP + RUNS and sum(times) + times[-1] <= seconds):
            times.append(run_seconds(lambda: losses.append(step.run())))
        allocated = device.peak_allocated
    finally:
        step.close()
    timings = times[WARMUP:] or times[-1:]
    median = statistics.median(timings)
    return _row(rows, checkpointing) | {
        "step_seconds": median,
        "runs": len(timings),
        "warmup": len(times) - len(timings),
        "tokens_per_second": step.tokens / median,
        "loss": losses[-1],
        "planned": step.session.memory().training,
        "allocated": allocated,
    }


def best(rows: Sequence[Record]) -> Record:
    """A summary of the rows that ran.

    Returns:
        fastest, largest: the rows with the most tokens per second and the most rows; None if none ran.
        checkpointing: for each batch that was timed both ways, the ratios of time and memory, with to without.
    """
    completed_rows = [row for row in rows if row["status"] != OOM]
    ways = {(row["batch"], row["gradient_checkpointing"]): row for row in completed_rows if row["warmup"]}
    pairs = [(ways[batch, False], ways[batch, True]) for batch, way in ways if not way and (batch, True) in ways]
    ratios = [
        {
            "batch": plain["batch"],
            "time": checkpointed["step_seconds"] / plain["step_seconds"] if plain["step_seconds"] else None,
            "memory": checkpointed["planned"] / plain["planned"],
        }
        for plain, checkpointed in pairs
    ]
    fastest = max(completed_rows, key=lambda row: row["tokens_per_second"], default=None)
    largest = max(completed_rows, key=lambda row: (row["batch"], row["tokens_per_second"]), default=None)
    return {"kind": "best", "fastest": fastest, "largest": largest, "checkpointing": ratios}


FAILED = "failed"


def pairs_of(product: int) -> list[tuple[int, int]]:
    """(rows per batch, batches per step) for each divisor, the smallest batch first."""
    return [(rows, product // rows) for rows in range(1, product + 1) if product % rows == 0]


def search_pairs(work: Work, repeat: int = 2, events: Events = SILENT, opened: Device | None = None) -> Record:
    """Train with each pair whose product is that of the given batch and accumulation and which fits, `repeat` times in
    turn.

    Returns:
        {"header": ..., "pairs": [...], "fastest": a pair or None}. A pair's samples_per_second is the median of its
        runs; `status` is OK, OOM if it is not run because its plan exceeds the budget, or failed.

    Raises:
        UserError: as `run_training`.
    """
    if repeat < 1:
        raise UserError(f"{flag('repeat')} must be at least 1, not {repeat}.")
    with benchmark_option_names(TRAINING), tempfile.TemporaryDirectory(prefix="wgpu-lora-bench-") as directory:
        args, model = prepared(work, Path(directory), opened)
        first = prepare_job(replace(args, output=str(Path(directory) / "first")), model)
        head = header_of(work, first, model)
        events.measured(head)
        with recording(work, args, model) as entry:
            pairs = list(_timed_pairs(first.run.args, model, Path(directory), repeat, events))
            completed_pairs = [pair for pair in pairs if pair["status"] == OK]
            fastest = max(completed_pairs, key=lambda pair: pair["samples_per_second"], default=None)
            entry["results"] = {"fastest": fastest}
            note_failure(entry, [] if fastest else ["no pair could be timed"])
        result = {"kind": "fastest", "fastest": fastest}
        events.measured(result)
    return {"header": head, "pairs": pairs, "fastest": fastest}


def _timed_pairs(
    args: TrainingArguments, model: LoadedModel, directory: Path, repeat: int, events: Events
) -> Iterator[Record]:
    """A record for each pair; rounds over all pairs, so that what else runs on the machine affects all alike."""
    _, rows, accumulation = args.batching
    available = budget_bytes(model.device.info, args.budget()).bytes
    pairs: list[Record] = []
    for batch, batches in pairs_of(rows * accumulation):
        record: Record = {"kind": "pair", "batch": batch, "accumulation": batches, "runs": []}
        try:
            peak: int | None = _job(args, model, record, directory).session.memory().peak_device_bytes
            why = None if available is None or peak is None or peak <= available else "more than the budget"
        except UserError as error:
            peak, why = None, str(error)
        pairs.append(record | {"status": OOM if why else OK, "why": why, "peak_planned": peak})
    for number in range(repeat):
        for record in pairs:
            if record["status"] == OK:
                try:
                    record["runs"].append(
                        time_run(_job(args, model, record, directory / f"{number}"))["samples_per_second"]
                    )
                except UserError as error:
                    record |= {"status": FAILED, "why": str(error)}
    for record in pairs:
        record["samples_per_second"] = statistics.median(record["runs"]) if record["status"] == OK else None
        events.measured(record)
        yield record


def _job(args: TrainingArguments, model: LoadedModel, pair: Record, directory: Path) -> Job[Any]:
    output = str(directory / f"{pair['batch']}x{pair['accumulation']}")
    sizes = {"per_device_train_batch_size": pair["batch"], "gradient_accumulation_steps": pair["accumulation"]}
    return prepare_job(replace(args, output=output, **sizes), model)
