"""Result files of any kind beside each other: what each measured, by name, for one table across devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.bench import batch_search, training_runs
from wgpu_lora.bench.batch_search import OOM
from wgpu_lora.bench.brick_results import NAME, VERSION, Header, Result, damaged, read_lines
from wgpu_lora.bench.training_runs import work_name
from wgpu_lora.errors import UserError
from wgpu_lora.files.typed_json import typed
from wgpu_lora.names.text import count_noun

BRICKS, TRAINING, BATCHES = NAME, *(module.SCHEMA.partition("/")[0] for module in (training_runs, batch_search))
VERSIONS = dict(schema.split("/") for schema in (f"{NAME}/{VERSION}", training_runs.SCHEMA, batch_search.SCHEMA))
KINDS = {BRICKS: "bricks", TRAINING: "training", BATCHES: "batches"}
# Figures of a training -> what they are called, and their unit.
FIGURES = {
    "seconds": ("time", "s"),
    "samples_per_second": ("samples", "/s"),
    "tokens_per_second": ("processed tokens", "/s"),
    "trained_tokens_per_second": ("trained tokens", "/s"),
    "final_loss": ("final loss", ""),
}


@dataclass(frozen=True)
class Figure:
    """A measured value. unit: s, /s, bytes, rows or none."""

    value: float
    unit: str


@dataclass(frozen=True)
class ResultFile:
    """A result file: its kind, its device, when and what it measured, and its figures by name."""

    path: str
    kind: str
    device: str
    time: str
    work: Mapping[str, Any]
    figures: dict[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True)
class _Batch:
    batch: int
    gradient_checkpointing: bool
    status: str
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    planned: int | None = None


@dataclass(frozen=True)
class _Pair:
    batch: int
    accumulation: int
    samples_per_second: float | None = None


@dataclass(frozen=True)
class _Summary:
    spread: dict[str, dict[str, Any]]
    memory: dict[str, Any]


def read_measured(path: str | Path) -> ResultFile:
    """A result file of any kind. Raises UserError if it is none, or is damaged or incomplete."""
    schema, header, lines = read_lines(path, VERSIONS)
    try:
        device = typed(dict[str, Any], header.get("device"), "'device'")
        name, timestamp = typed(str, device.get("name"), "'device.name'"), typed(str, header.get("time", ""), "'time'")
        work = typed(dict[str, Any], header.get("options" if schema == BRICKS else "work"), "what was measured")
        figures = {BRICKS: _bricks, TRAINING: _training, BATCHES: _batches}[schema](header, lines)
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, ValueError(str(error))) from None
    if not figures:
        raise UserError(f"{path} has no results, as after an interrupted run: measure it again.")
    return ResultFile(str(path), KINDS[schema], name, timestamp, work, figures)


def _bricks(header: Header, lines: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    return {result.label: Figure(result.seconds, "s") for result in map(Result.of, lines)}


def _training(header: Header, lines: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    result, name = dict[str, Figure](), work_name(header)
    for line in lines:
        if line.get("kind") == "summary":
            summary = typed(_Summary, line)
            for key, (label, unit) in FIGURES.items():
                median = typed(float | None, summary.spread[key].get("median"), key)
                if median is not None:
                    result[f"{name}: {label}"] = Figure(median, unit)
            result[f"{name}: memory"] = Figure(typed(int, summary.memory.get("peak"), "'memory.peak'"), "bytes")
        elif line.get("kind") == "pair":
            pair = typed(_Pair, line)
            if pair.samples_per_second is not None:
                result[f"{name}: samples, {pair.batch} x {pair.accumulation}"] = Figure(pair.samples_per_second, "/s")
    return result


def _batches(header: Header, lines: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    result, work = dict[str, Figure](), header["work"]
    name = f"{work['model']}, {count_noun(typed(int, work['layers'], 'layers'), 'layer')}"
    largest = dict[str, int]()
    for row in (typed(_Batch, line) for line in lines if line.get("kind") == "batch"):
        way = ", checkpointing" if row.gradient_checkpointing else ""
        if row.status != OOM:
            largest[way] = max(largest.get(way, 0), row.batch)
            at = f"{name}, {count_noun(row.batch, 'row')}{way}"
            for label, value, unit in (
                ("step", row.step_seconds, "s"),
                ("tokens", row.tokens_per_second, "/s"),
                ("memory", row.planned, "bytes"),
            ):
                if value is not None:
                    result[f"{at}: {label}"] = Figure(value, unit)
    return result | {f"{name}, largest batch{way}": Figure(rows, "rows") for way, rows in largest.items()}


def differences(files: Sequence[ResultFile]) -> list[str]:
    """The differences in how files of the same kind were measured, as text."""
    result = []
    for kind in dict.fromkeys(file.kind for file in files):
        works = [_flat(file.work) for file in files if file.kind == kind]
        for name in (name for name in works[0] if all(name in work for work in works)):  # not those of later versions
            values = [work[name] for work in works]
            if any(value != values[0] for value in values):
                result.append(f"{name.replace('_', ' ')}: {', '.join(str(value) for value in values)}")
    return result


def _flat(work: Mapping[str, Any]) -> dict[str, Any]:
    """The measured options, without paths of this run."""
    options = work.get("options")
    facts = {name: value for name, value in work.items() if name != "options"}
    excluded = ("output", "data", "device")
    return facts | {n: v for n, v in (options if isinstance(options, dict) else {}).items() if n not in excluded}
