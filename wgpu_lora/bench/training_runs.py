"""Whole training runs, timed repeatedly: of a recipe, or of a shape with synthetic weights and rows."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from wgpu_lora.bench.brick_results import header
from wgpu_lora.bench.larger_models import project
from wgpu_lora.bench.timing import spread
from wgpu_lora.bench.training_step import (
    TRAINING,
    WARMUP,
    TrainingStep,
    benchmark_option_names,
    chosen_model,
    synthetic_rows,
)
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events, StepResult
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.memory_leases import budget_bytes, device_memory
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.job import Job
from wgpu_lora.train.memory import format_bytes
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.prepare_job import prepare_job, with_demo_data
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.train.run.stop_reasons import FINISHED
from wgpu_lora.train.track.run_log import run_name
from wgpu_lora.train.track.run_recorder import device_facts, given_options, note_failure, recorded

SCHEMA = "wgpu-lora-bench-training/2"
# Defaults for a shape.
SYNTHETIC = {"max_steps": 10, "max_length": 512, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
SPREAD_OVER = ("seconds", "samples_per_second", "tokens_per_second", "trained_tokens_per_second", "final_loss")
EXCLUDED = f"loading, and the first {WARMUP} steps, which compile and measure where to split submits"
Record = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What to train: a recipe by name or path (by default the demo's), or a named shape on synthetic rows.

    layers: of a shape only. options: options of a training run that override the recipe or the defaults for a shape.
    where: the source of the options, which begins error messages.
    """

    recipe: str | None = None
    shape: str | None = None
    layers: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    where: str = "The command line"

    def __post_init__(self) -> None:
        steps = self.options.get("max_steps")
        if self.recipe and self.shape:
            raise UserError(f"{flag('recipe')} and {flag('shape')} are both given: leave one of them out.")
        if self.shape and {"data", "model"} & self.options.keys():
            raise UserError(
                f"{flag('data')} and {flag('model')} go with {flag('recipe')}: a shape has synthetic weights and rows."
            )
        if {"num_train_epochs", "max_steps"} <= self.options.keys():
            with benchmark_option_names(TRAINING):
                epochs = flag("num_train_epochs")
            raise UserError(f"{epochs} and {flag('max_steps')} are both given: leave one of them out.")
        if self.layers is not None and not self.shape:
            raise UserError(f"{flag('layers')} goes with {flag('shape')}: a recipe trains the whole of its model.")
        if steps is not None and steps <= WARMUP:
            raise UserError(
                f"{setting('max_steps', steps)} leaves nothing to time: the first {WARMUP} steps are warm-up, so give "
                f"at least {WARMUP + 1}."
            )


def run_training(
    work: Work,
    repeat: int = 2,
    events: Events = SILENT,
    opened: Device | None = None,
    shapes: Sequence[str] = (),
    max_spread: float | None = None,
) -> Record:
    """Train `repeat` times from the same start, in a temporary directory.

    A run that fails is recorded with its `error`, if another one has succeeded or follows.

    Args:
        max_spread: the largest coefficient of variation of the runs' time and speed that passes.
        events: gets `measured` for the header, each run as soon as it has ended, the summary and the projections.
        shapes: larger models to project the runs to.

    Returns:
        {"header": ..., "runs": [...], "summary": ..., "projections": [...]}

    Raises:
        UserError: `prepare_job` refuses the options; a shape does not fit, and the message names how many layers would;
            a run has too few steps to time; all runs failed. KeyboardInterrupt: a run was interrupted.
    """
    if repeat < 1:
        raise UserError(f"{flag('repeat')} must be at least 1, not {repeat}.")
    if max_spread is not None and repeat < 2:
        raise UserError(f"{flag('max_spread')} compares runs: give {setting('repeat', 2)} or more.")
    runs: list[Record] = []
    with (
        benchmark_option_names(TRAINING),
        tempfile.TemporaryDirectory(prefix="wgpu-lora-bench-") as directory,
        ExitStack() as stack,
    ):
        args, model = prepared(work, Path(directory), opened)
        entry = stack.enter_context(recording(work, args, model))
        for number in range(repeat):
            job = prepare_job(replace(args, output=str(Path(directory) / f"run-{number}")), model)
            if not number:
                head = header_of(work, job, model)
                events.measured(head)
            runs.append(
                {
                    "kind": "run",
                    "number": number,
                    **time_run_or_error(job, last=number + 1 == repeat and not _good(runs)),
                }
            )
            events.measured(runs[-1])
        summary = summarised(runs, model, max_spread)
        events.measured(summary)
        medians = {name: result["median"] or 0.0 for name, result in summary["spread"].items()}
        entry["results"] = medians
        varying = [
            f"the runs vary by {gate['spread']:.1%}" for gate in [summary["gate"]] if gate and not gate["passed"]
        ]
        failed = [run["error"] or run["stop_reason"] for run in runs if run["stop_reason"] not in FINISHED]
        note_failure(entry, failed + varying)
        peak = _good(runs)[0]["peak_planned"]
        projections = list(project(medians, head["work"]["samples"], job.run.args, model, shapes, peak))
        for record in projections:
            events.measured(record)
    return {"header": head, "runs": runs, "summary": summary, "projections": projections}


def _good(runs: Sequence[Record]) -> list[Record]:
    return [run for run in runs if run["error"] is None]


def time_run_or_error(job: Job[Any], last: bool) -> Record:
    """`time_run`, or the error of a run that failed; raises it if there is no other run to report."""
    watch, total_steps = _Watch(), job.run.stream.total_steps()
    try:
        return time_run(job, watch)
    except UserError as error:
        if last:
            raise
        counts = {"planned_steps": total_steps, "done_steps": len(watch.steps)}
        return {"stop_reason": "error", "error": str(error), **counts}


def summarised(runs: Sequence[Record], model: LoadedModel, max_spread: float | None = None) -> Record:
    """The summary of runs, at least one of which succeeded.

    Returns:
        spread: of the figures in SPREAD_OVER. steps: done and planned, of all runs. errors: of the runs.
        memory: the planned peak, its share of the device's memory, and the bytes left of the budget; None if not known.
        gate: the largest of the spreads of time and speed, its limit, and whether it passed; None without a limit.
    """
    good, info = _good(runs), model.device.info
    spreads = {name: spread([run[name] for run in good]) for name in SPREAD_OVER}
    peak, memory, budget = good[0]["peak_planned"], device_memory(info), budget_bytes(info).bytes
    gate = None
    if max_spread is not None:
        result = max(spreads[name]["cv"] or 0.0 for name in ("seconds", "samples_per_second"))
        gate = {"limit": max_spread, "spread": result, "passed": len(good) > 1 and result <= max_spread}
    return {
        "kind": "summary",
        "runs": len(runs),
        "steps": {name: sum(run[f"{name}_steps"] for run in runs) for name in ("done", "planned")},
        "errors": [run["error"] for run in runs if run["error"] is not None],
        "memory": {
            "peak": peak,
            "total": memory.total if memory else None,
            "share": peak / memory.total if memory else None,
            "headroom": None if budget is None else budget - peak,
        },
        "gate": gate,
        "spread": spreads,
    }


def recording(work: Work, args: TrainingArguments, model: LoadedModel) -> AbstractContextManager[dict[str, Any]]:
    """The benchmark in the run log."""
    return recorded(
        "bench training",
        run_name(model.name, args.base_dtype, True, args.use_rslora, args.objective, args.compute_dtype),
        objective=args.objective,
        device=device_facts(model.device.info),
        config=given_options(args.as_dict() | {"recipe": work.recipe, "shape": work.shape, "layers": work.layers}),
    )


def header_of(work: Work, job: Job[Any], model: LoadedModel) -> Record:
    """The header. Raises UserError if there are too few steps to time."""
    run = job.run
    if (steps := run.stream.total_steps()) <= WARMUP:
        raise UserError(
            f"This training has {count_noun(steps, 'step')}, of which the first {WARMUP} are warm-up: "
            f"give {setting('max_steps', WARMUP + 1)} or more."
        )
    # Samples of the whole training, which --max-steps may have cut short.
    samples = None if work.shape else round(len(run.stream.prepared.rows) * run.args.num_train_epochs)
    shape = {"shape": work.shape, "layers": model.config.num_hidden_layers} if work.shape else {}
    recipe = None if work.shape else work.recipe or "demo"
    description = {"recipe": recipe, **shape, "options": run.args.as_dict(), "samples": samples}
    return header(SCHEMA, model.device, work=description, excluded=EXCLUDED)


# -- the work ----------------------------------------------------------------------------------------------------------


def prepared(work: Work, directory: Path, opened: Device | None) -> tuple[TrainingArguments, LoadedModel]:
    """The options, and the model, declared."""
    if work.shape:
        return _synthetic(work, work.shape, directory, opened)
    args = with_demo_data(resolve_options(_options(work), work.recipe or "demo", work.where)[0])
    # A resumed run has fewer steps left, and writes to its own directory.
    args = replace(args, resume=False, run_log=False, report_to=None)
    return args, chosen_model(args.model, None, None, opened or Device(args.device), args.base_dtype)


def _options(work: Work) -> dict[str, Any]:
    """The options; with epochs, a number of steps that the recipe sets does not apply."""
    return {**work.options, **({"max_steps": -1} if "num_train_epochs" in work.options else {})}


def _synthetic(work: Work, shape: str, directory: Path, opened: Device | None) -> tuple[TrainingArguments, LoadedModel]:
    args = from_values({**SYNTHETIC, **_options(work)}, work.where)
    steps = args.max_steps if args.max_steps > 0 else SYNTHETIC["max_steps"]  # of an epoch
    args = replace(
        args,
        lora_alpha=2 * args.lora_r,
        save_steps=0,
        save_minutes=0.0,
        data=str(directory / "rows.jsonl"),
        model=shape,
    )
    model = chosen_model(None, shape, work.layers, opened or Device(args.device), args.base_dtype)
    TrainingStep.fitting(model, args)
    _, rows, accumulation = args.batching
    ids = synthetic_rows(min(steps, 64) * rows * accumulation, args.length, model.config.vocab_size)
    lines = (json.dumps({"input_ids": row, "labels": row}) for row in ids.tolist())
    Path(args.data or "").write_text("".join(f"{line}\n" for line in lines))
    return args, model


# -- one run -----------------------------------------------------------------------------------------------------------


class _Watch(Events):
    """Records each step, and when it ended."""

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.ended: list[float] = []

    def step(self, result: StepResult) -> None:
        self.steps.append(result)
        self.ended.append(time.perf_counter())


def time_run(job: Job[Any], watch: _Watch | None = None) -> Record:
    """Run a job. `seconds` is the time after the warm-up, including held-out losses and saving; speeds are those of the
    steps alone.

    Raises:
        KeyboardInterrupt: it was interrupted. UserError: it ended during its warm-up.
    """
    watch, begin = watch or _Watch(), time.perf_counter()
    record = job.train(watch)
    end = time.perf_counter()
    if record.stop_reason == "interrupt":
        raise KeyboardInterrupt
    if len(watch.steps) <= WARMUP:
        raise UserError(
            f"The training ended ({record.stop_reason}) after {count_noun(len(watch.steps), 'step')}, but the first "
            f"{WARMUP} are warm-up: there is nothing to time."
        )
    steps, warm = watch.steps[WARMUP:], watch.ended[WARMUP - 1]
    samples = [len(step.samples) for step in islice(job.run.stream.steps(), WARMUP, len(watch.steps))]
    step_seconds = sum(step.seconds for step in steps)
    return {
        "stop_reason": record.stop_reason,
        "error": None,
        "planned_steps": job.run.stream.total_steps(),
        "done_steps": len(watch.steps),
        "seconds": end - warm,
        "warmup_seconds": warm - begin,
        "steps": len(steps),
        "warmup_steps": WARMUP,
        "step_seconds": spread([step.seconds for step in steps]),
        "samples_per_second": sum(samples) / step_seconds,
        "tokens_per_second": sum(step.step_processed_tokens for step in steps) / step_seconds,
        "trained_tokens_per_second": sum(step.step_tokens for step in steps) / step_seconds,
        "final_loss": record.loss,
        "final_eval_loss": record.eval_loss,
        "peak_planned": record.memory.peak,
        "peak_allocated": record.memory.peak_allocated,
    }


Figures = Mapping[str, Any]
NAMES = {
    "seconds": "seconds, after the warm-up",
    "samples_per_second": "samples/s",
    "tokens_per_second": "processed tokens/s",
    "trained_tokens_per_second": "trained tokens/s",
    "final_loss": "final loss",
}


def work_name(header: Figures) -> str:
    """recipe demo; shape tiny-qwen3, 8 layers"""
    work = header["work"]
    recipe, shape = work.get("recipe"), work.get("shape")
    return f"recipe {recipe}" if recipe else f"shape {shape}, {count_noun(work['layers'], 'layer')}"


def steps_text(summary: Figures) -> str:
    """20 of 20 steps done, no errors"""
    steps, count = summary["steps"], len(summary["errors"])
    errors = count_noun(count, "error") if count else "no errors"
    return f"{steps['done']:,} of {count_noun(steps['planned'], 'step')} done, {errors}"


def memory_text(memory: Figures) -> str:
    """1.2 GiB planned at peak, 5.0% of the device's 24.0 GiB; 19.2 GiB of the budget are left"""
    text = f"{format_bytes(memory['peak'])} planned at peak"
    if memory["share"] is not None:
        share = f"{memory['share']:.1%}" if memory["share"] >= 0.001 else "less than 0.1%"
        text += f", {share} of the device's {format_bytes(memory['total'])}"
    if memory["headroom"] is not None:
        headroom = memory["headroom"]
        text += (
            f"; {format_bytes(headroom)} of the budget are left"
            if headroom >= 0
            else f"; {format_bytes(-headroom)} over the budget"
        )
    return text


def gate_text(gate: Figures) -> str:
    """the runs vary by 0.42%, within the limit of 1%"""
    within = "within" if gate["passed"] else "more than"
    return f"the runs vary by {gate['spread']:.2%}, {within} the limit of {100 * gate['limit']:.3g}%"


def summary_text(figures: Figures) -> str:
    """The summary of what `run_training` returned."""
    header, summary = figures["header"], figures["summary"]
    device, commit = header["device"], header["commit"]
    facts = {
        "Device": f"{device['name']}, {device['driver']}, {device['backend']}",
        "Time": header["time"],
        "Versions": ", ".join(f"{name} {version}" for name, version in header["versions"].items()),
        "Commit": "unknown" if not commit else commit["id"][:12],
        "Steps": f"{count_noun(summary['runs'], 'run')}: {steps_text(summary)}; not counted: {header['excluded']}",
        "Memory": memory_text(summary["memory"]),
    }
    if summary["gate"]:
        facts["Spread"] = gate_text(summary["gate"])
    lines = [f"# Training benchmark: {work_name(header)}", ""]
    lines += [f"- {name}: {text}" for name, text in facts.items()]
    lines += [f"- Error: {error}" for error in summary["errors"]]
    columns = ("", "median", "min", "max", "spread")
    lines += _table(columns, [_spread(NAMES[name], spread) for name, spread in summary["spread"].items()])
    if figures["projections"]:
        columns = ("model", "grade", "memory", "samples/s", "seconds")
        lines += _table(columns, [_projection(record) for record in figures["projections"]])
        lines += ["", "Memory is each model's plan; time is projected from counted operations at the measured rate."]
    return "\n".join(lines) + "\n"


def _spread(name: str, spread: Figures) -> Sequence[str]:
    cv = "" if spread["cv"] is None else f"{spread['cv']:.2%}"
    return name, *("" if spread[key] is None else f"{spread[key]:.6g}" for key in ("median", "min", "max")), cv


def _projection(record: Figures) -> Sequence[str]:
    peak = "not possible" if record["peak_planned"] is None else format_bytes(record["peak_planned"])
    speed, seconds = f"{record['samples_per_second']:.3g}", f"{record['seconds']:,.0f}"
    return record["shape"], record["grade"], peak, speed, seconds


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in columns[1:])]
    return ["", *(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))]
