"""Batches and accumulations of the same product, timed in turn: the same training in other pieces."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from wgpu_lora.bench.max_batch import OK, OOM
from wgpu_lora.bench.step import TRAINING, own_words
from wgpu_lora.bench.training import Work, header_of, prepared, recording, timed
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.names.naming import flag
from wgpu_lora.share import budget_bytes
from wgpu_lora.track.recording import note_failure
from wgpu_lora.train.finetune import FinetuneJob, prepare_job
from wgpu_lora.train.options.arguments import TrainingArguments

FAILED = "failed"
Record = dict[str, Any]


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
    with own_words(TRAINING), tempfile.TemporaryDirectory(prefix="wgpu-lora-bench-") as place:
        args, model = prepared(work, Path(place), opened)
        first = prepare_job(replace(args, output=str(Path(place) / "first")), model)
        head = header_of(work, first, model)
        events.measured(head)
        with recording(work, args, model) as entry:
            pairs = list(_timed_pairs(first.run.args, model, Path(place), repeat, events))
            ran = [pair for pair in pairs if pair["status"] == OK]
            fastest = max(ran, key=lambda pair: pair["samples_per_second"], default=None)
            entry["results"] = {"fastest": fastest}
            note_failure(entry, [] if fastest else ["no pair could be timed"])
        found = {"kind": "fastest", "fastest": fastest}
        events.measured(found)
    return {"header": head, "pairs": pairs, "fastest": fastest}


def _timed_pairs(
    args: TrainingArguments, model: LoadedModel, place: Path, repeat: int, events: Events
) -> Iterator[Record]:
    """A record for each pair; rounds over all pairs, so that what else runs on the machine affects all alike."""
    _, rows, accumulation = args.batching
    available = budget_bytes(model.device.info, args.budget()).bytes
    pairs: list[Record] = []
    for batch, batches in pairs_of(rows * accumulation):
        record: Record = {"kind": "pair", "batch": batch, "accumulation": batches, "runs": []}
        try:
            peak: int | None = _job(args, model, record, place).session.memory().guarded
            why = None if available is None or peak is None or peak <= available else "more than the budget"
        except UserError as error:
            peak, why = None, str(error)
        pairs.append(record | {"status": OOM if why else OK, "why": why, "peak_planned": peak})
    for number in range(repeat):
        for record in pairs:
            if record["status"] == OK:
                try:
                    record["runs"].append(timed(_job(args, model, record, place / f"{number}"))["samples_per_second"])
                except UserError as error:
                    record |= {"status": FAILED, "why": str(error)}
    for record in pairs:
        record["samples_per_second"] = statistics.median(record["runs"]) if record["status"] == OK else None
        events.measured(record)
        yield record


def _job(args: TrainingArguments, model: LoadedModel, pair: Record, place: Path) -> FinetuneJob:
    output = str(place / f"{pair['batch']}x{pair['accumulation']}")
    sizes = {"per_device_train_batch_size": pair["batch"], "gradient_accumulation_steps": pair["accumulation"]}
    return prepare_job(replace(args, output=output, **sizes), model)
