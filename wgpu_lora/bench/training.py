"""The product's whole training loop, timed repeatedly: on a recipe, or on a shape with made-up weights and rows."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wgpu_lora.bench.header import header
from wgpu_lora.bench.step import WARMUP, TrainingStep, check_fits, chosen_model, made_up_rows
from wgpu_lora.bench.words import TRAINING, own_words
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events, StepResult
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.files import read_model
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.models.shapes import shape_config
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.finetune import FinetuneJob, prepare_job, with_demo_data
from wgpu_lora.train.length import fit_length
from wgpu_lora.train.recipes import gather
from wgpu_lora.words import counted

SCHEMA = "wgpu-lora-bench-training/1"
# Of a shape's training, where nothing else is said.
SYNTHETIC = {"max_steps": 10, "max_length": 512, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
SPREAD_OVER = ("seconds", "samples_per_second", "tokens_per_second", "trained_tokens_per_second", "final_loss")
EXCLUDED = f"loading, and the first {WARMUP} steps, which compile and find where to split submits"
Record = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What is trained: a recipe by name or path (the demo's by default), or a named shape on made-up rows.

    layers belongs to a shape, data and model to a recipe; all else goes over what a recipe says, or a shape's
    defaults. tokens: of a shape's rows, of a recipe's at most. batch, accumulation: rows of a batch, batches of a step.
    """

    recipe: str | None = None
    shape: str | None = None
    layers: int | None = None
    tokens: int | None = None
    batch: int | None = None
    accumulation: int | None = None
    data: str | None = None
    model: str | None = None
    rank: int | None = None
    base_dtype: str | None = None
    compute_dtype: str | None = None
    tune: bool | None = None
    max_steps: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.recipe and self.shape:
            raise UserError("--recipe and --shape are both given: leave one of them out.")
        if self.shape and (self.data or self.model):
            raise UserError("--data and --model go with --recipe: a shape has made-up weights and rows.")
        if self.layers is not None and not self.shape:
            raise UserError("--layers goes with --shape: a recipe trains the whole of its model.")
        if self.max_steps is not None and self.max_steps <= WARMUP:
            raise UserError(
                f"--max-steps {self.max_steps} leaves nothing to time: the first {WARMUP} steps are warm-up, so give "
                f"at least {WARMUP + 1}."
            )


def run_training(work: Work, repeat: int = 2, events: Events = SILENT, opened: Device | None = None) -> Record:
    """Trains `repeat` times from the same start, in a directory that is removed again.

    Args:
        events: told of `measured`: the header, then each run, as soon as it is known, then the summary.

    Returns:
        {"header": ..., "runs": [...], "summary": ...}; see `records` for them as lines of a file.

    Raises:
        UserError: what `prepare_job` refuses; a shape that does not fit, with the layers that would; a run with too
            few steps to time. KeyboardInterrupt: a run was interrupted.
    """
    if repeat < 1:
        raise UserError(f"--repeat must be at least 1, not {repeat}.")
    runs: list[Record] = []
    with own_words(TRAINING), tempfile.TemporaryDirectory(prefix="wgpu-lora-bench-") as place:
        args, model = _prepared(work, Path(place), opened)
        described = _described(args, model, work)
        head = header(SCHEMA, model.device, work=described, excluded=EXCLUDED)
        for number in range(repeat):
            job = prepare_job(replace(args, output=str(Path(place) / f"run-{number}")), model)
            if not number:
                steps = job.run.stream.total_steps()
                if steps <= WARMUP:
                    raise UserError(
                        f"This training has {counted(steps, 'step')}, of which the first {WARMUP} are warm-up: "
                        f"give --max-steps {WARMUP + 1} or more."
                    )
                # Of the whole training, which --max-steps may have cut short here.
                rows, epochs = len(job.run.stream.prepared.rows), job.run.args.num_train_epochs
                head["work"]["samples"] = None if work.shape else round(rows * epochs)
                events.measured(head)
            runs.append({"kind": "run", "number": number, **timed(job)})
            events.measured(runs[-1])
    summary = {"kind": "summary", "runs": repeat, "spread": spreads(runs)}
    events.measured(summary)
    return {"header": head, "runs": runs, "summary": summary}


def trained_config(found: Record) -> ModelConfig:
    """The config of the model that a result is of."""
    work = found["header"]["work"]
    if work["recipe"] is None:
        return shape_config(work["shape"], work["layers"])
    return read_model(resolve_model(work["options"]["model"] or "demo")).config


def records(found: Record) -> list[Record]:
    """The lines of a result file: header, runs, summary."""
    return [found["header"], *found["runs"], found["summary"]]


# -- the work ----------------------------------------------------------------------------------------------------------


def _prepared(work: Work, place: Path, opened: Device | None) -> tuple[TrainingArguments, LoadedModel]:
    """The options, and the model that they name, declared."""
    options = {
        "max_steps": work.max_steps,
        "device": work.device,
        "data": work.data,
        "model": work.model,
        "per_device_train_batch_size": work.batch,
        "gradient_accumulation_steps": work.accumulation,
        "max_length": work.tokens,
        "lora_r": work.rank,
        "base_dtype": work.base_dtype,
        "compute_dtype": work.compute_dtype,
        "tune": work.tune,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if work.shape:
        return _synthetic(work, given, place, opened)
    args = with_demo_data(gather(given, work.recipe or "demo", "The command line")[0])
    # A resumed run would have its steps behind it, and would write where somebody keeps it.
    args = replace(args, resume=False)
    model = chosen_model(args.model, None, None, opened or Device(args.device), args.base_dtype)
    return fit_length(args, model.config.max_position_embeddings)[0], model


def _synthetic(work: Work, given: Record, place: Path, opened: Device | None) -> tuple[TrainingArguments, LoadedModel]:
    args = TrainingArguments(**{**SYNTHETIC, **given})
    args = replace(args, lora_alpha=2 * args.lora_r, save_steps=0)
    model = chosen_model(None, work.shape, work.layers, opened or Device(args.device), args.base_dtype)
    (_, rows, accumulation), tokens = args.batching, args.length

    def step(of: LoadedModel) -> TrainingStep:  # refuses sizes that are not possible
        return TrainingStep(of, rows, tokens, args.lora_r, compute_dtype=args.compute_dtype)

    check_fits(model, lambda of: step(of).session.memory().peak)
    ids = made_up_rows(min(args.max_steps, 64) * rows * accumulation, tokens, model.config.vocab_size)
    lines = (json.dumps({"input_ids": row, "labels": row}) for row in ids.tolist())
    data = place / "rows.jsonl"
    data.write_text("".join(f"{line}\n" for line in lines))
    return replace(args, model=model.name, data=str(data)), model


def _described(args: TrainingArguments, model: LoadedModel, work: Work) -> Record:
    named = {"shape": work.shape, "layers": model.config.num_hidden_layers} if work.shape else {}
    return {"recipe": None if work.shape else work.recipe or "demo", **named, "options": args.as_dict()}


# -- one run -----------------------------------------------------------------------------------------------------------


class _Watch(Events):
    """Notes of each step when it ended, the seconds it took, and what was in it."""

    def __init__(self, job: FinetuneJob):
        self._stream = job.run.stream
        self._steps = self._stream.steps()
        self.ended: list[float] = []
        self.seconds: list[float] = []
        self.samples: list[int] = []
        self.tokens: list[int] = []
        self.trained: list[int] = []

    def step(self, result: StepResult) -> None:
        step = next(self._steps)
        rows = [row for sample in step.samples for row in self._stream.prepared.samples[sample]]
        self.ended.append(time.perf_counter())
        self.seconds.append(result.seconds)
        self.samples.append(len(rows))
        self.tokens.append(sum(len(row.input_ids) for row in rows))
        self.trained.append(sum(row.trained_tokens for row in rows))


def timed(job: FinetuneJob) -> Record:
    """Runs a job. Seconds are of the loop after its warm-up, held-out losses and saving included; speeds are of its
    steps alone.

    Raises:
        KeyboardInterrupt: it was interrupted. UserError: it ended within its warm-up.
    """
    watch = _Watch(job)
    begin = time.perf_counter()
    record = job.train(watch)
    end = time.perf_counter()
    if record.stop_reason == "interrupt":
        raise KeyboardInterrupt
    if len(watch.seconds) <= WARMUP:
        raise UserError(
            f"The training ended ({record.stop_reason}) after {counted(len(watch.seconds), 'step')}, but the first "
            f"{WARMUP} are warm-up: there is nothing to time."
        )
    steps = watch.seconds[WARMUP:]
    spent = sum(steps)
    return {
        "stop_reason": record.stop_reason,
        "seconds": end - watch.ended[WARMUP - 1],
        "warmup_seconds": watch.ended[WARMUP - 1] - begin,
        "steps": len(steps),
        "warmup_steps": WARMUP,
        "step_seconds": spread(steps),
        "samples_per_second": sum(watch.samples[WARMUP:]) / spent,
        "tokens_per_second": sum(watch.tokens[WARMUP:]) / spent,
        "trained_tokens_per_second": sum(watch.trained[WARMUP:]) / spent,
        "final_loss": record.loss,
        "final_eval_loss": record.eval_loss,
        "peak_planned": record.memory.peak,
        "peak_allocated": record.memory.peak_allocated,
    }


def spread(values: Sequence[float]) -> Record:
    """How far values lie apart: variance is the sample's (n - 1), cv the deviation over the mean.

    Both are None where there is one value, which says nothing of spread; cv also where the mean is 0.
    """
    mean = statistics.fmean(values)
    variance = statistics.variance(values) if len(values) > 1 else None
    cv = None if variance is None or mean == 0 else variance**0.5 / abs(mean)
    return {
        "median": statistics.median(values),
        "mean": mean,
        "min": min(values),
        "max": max(values),
        "variance": variance,
        "cv": cv,
    }


def spreads(runs: Sequence[Mapping[str, Any]]) -> Record:
    """The spread between runs of everything that is compared."""
    return {name: spread([run[name] for run in runs]) for name in SPREAD_OVER}
