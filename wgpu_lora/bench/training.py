"""The product's whole training loop, timed repeatedly: on a recipe, or on a shape with synthetic weights and rows."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from wgpu_lora.bench.results import header
from wgpu_lora.bench.stats import spread
from wgpu_lora.bench.step import TRAINING, WARMUP, TrainingStep, chosen_model, own_words, synthetic_rows
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events, StepResult
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.files import read_model
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.models.shapes import shape_config
from wgpu_lora.names.naming import flag, setting
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
    """What is trained: a recipe by name or path (the demo's by default), or a named shape on synthetic rows.

    layers belongs to a shape. options: of a training run, over what a recipe says or a shape's defaults.
    """

    recipe: str | None = None
    shape: str | None = None
    layers: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = self.options.get("max_steps")
        if self.recipe and self.shape:
            raise UserError(f"{flag('recipe')} and {flag('shape')} are both given: leave one of them out.")
        if self.shape and {"data", "model"} & self.options.keys():
            raise UserError(
                f"{flag('data')} and {flag('model')} go with {flag('recipe')}: a shape has synthetic weights and rows."
            )
        if self.layers is not None and not self.shape:
            raise UserError(f"{flag('layers')} goes with {flag('shape')}: a recipe trains the whole of its model.")
        if steps is not None and steps <= WARMUP:
            raise UserError(
                f"{setting('max_steps', steps)} leaves nothing to time: the first {WARMUP} steps are warm-up, so give "
                f"at least {WARMUP + 1}."
            )

    @classmethod
    def of(cls, recipe: str | None = None, shape: str | None = None, layers: int | None = None, **options: Any) -> Work:
        """By the names that bench has for options; what is None is not given."""
        names = {own: name for name, own in TRAINING.items()}
        given = {names.get(name, name): value for name, value in options.items() if value is not None}
        return cls(recipe, shape, layers, given)


def run_training(work: Work, repeat: int = 2, events: Events = SILENT, opened: Device | None = None) -> Record:
    """Trains `repeat` times from the same start, in a directory that is removed again.

    Args:
        events: told of `measured`: the header, then each run, as soon as it is known, then the summary.

    Returns:
        {"header": ..., "runs": [...], "summary": ...}

    Raises:
        UserError: what `prepare_job` refuses; a shape that does not fit, with the layers that would; a run with too
            few steps to time. KeyboardInterrupt: a run was interrupted.
    """
    if repeat < 1:
        raise UserError(f"{flag('repeat')} must be at least 1, not {repeat}.")
    runs: list[Record] = []
    with own_words(TRAINING), tempfile.TemporaryDirectory(prefix="wgpu-lora-bench-") as place:
        args, model = _prepared(work, Path(place), opened)
        shape = {"shape": work.shape, "layers": model.config.num_hidden_layers} if work.shape else {}
        what = {"recipe": None if work.shape else work.recipe or "demo", **shape, "options": args.as_dict()}
        head = header(SCHEMA, model.device, work=what, excluded=EXCLUDED)
        for number in range(repeat):
            job = prepare_job(replace(args, output=str(Path(place) / f"run-{number}")), model)
            if not number:
                steps = job.run.stream.total_steps()
                if steps <= WARMUP:
                    raise UserError(
                        f"This training has {counted(steps, 'step')}, of which the first {WARMUP} are warm-up: "
                        f"give {setting('max_steps', WARMUP + 1)} or more."
                    )
                # Of the whole training, which --max-steps may have cut short here.
                rows, epochs = len(job.run.stream.prepared.rows), job.run.args.num_train_epochs
                head["work"]["samples"] = None if work.shape else round(rows * epochs)
                events.measured(head)
            runs.append({"kind": "run", "number": number, **timed(job)})
            events.measured(runs[-1])
    summary = {
        "kind": "summary",
        "runs": repeat,
        "spread": {name: spread([run[name] for run in runs]) for name in SPREAD_OVER},
    }
    events.measured(summary)
    return {"header": head, "runs": runs, "summary": summary}


def trained_config(found: Record) -> ModelConfig:
    """The config of the model that a result is of."""
    work = found["header"]["work"]
    if work["recipe"] is None:
        return shape_config(work["shape"], work["layers"])
    return read_model(resolve_model(work["options"]["model"] or "demo")).config


# -- the work ----------------------------------------------------------------------------------------------------------


def _prepared(work: Work, place: Path, opened: Device | None) -> tuple[TrainingArguments, LoadedModel]:
    """The options, and the model that they name, declared."""
    if work.shape:
        return _synthetic(work, place, opened)
    args = with_demo_data(gather(work.options, work.recipe or "demo", "The command line")[0])
    # A resumed run would have its steps behind it, and would write where somebody keeps it.
    args = replace(args, resume=False)
    model = chosen_model(args.model, None, None, opened or Device(args.device), args.base_dtype)
    return fit_length(args, model.config.max_position_embeddings)[0], model


def _synthetic(work: Work, place: Path, opened: Device | None) -> tuple[TrainingArguments, LoadedModel]:
    args = TrainingArguments(**{**SYNTHETIC, **work.options})
    args = replace(args, lora_alpha=2 * args.lora_r, save_steps=0)
    model = chosen_model(None, work.shape, work.layers, opened or Device(args.device), args.base_dtype)
    (_, rows, accumulation), tokens = args.batching, args.length

    TrainingStep.fitting(model, rows, tokens, args.lora_r, compute_dtype=args.compute_dtype)
    ids = synthetic_rows(min(args.max_steps, 64) * rows * accumulation, tokens, model.config.vocab_size)
    lines = (json.dumps({"input_ids": row, "labels": row}) for row in ids.tolist())
    data = place / "rows.jsonl"
    data.write_text("".join(f"{line}\n" for line in lines))
    return replace(args, model=model.name, data=str(data)), model


# -- one run -----------------------------------------------------------------------------------------------------------


class _Watch(Events):
    """Notes each step, and when it ended."""

    def __init__(self) -> None:
        self.steps: list[StepResult] = []
        self.ended: list[float] = []

    def step(self, result: StepResult) -> None:
        self.steps.append(result)
        self.ended.append(time.perf_counter())


def timed(job: FinetuneJob) -> Record:
    """Runs a job. Seconds are of the loop after its warm-up, held-out losses and saving included; speeds are of its
    steps alone.

    Raises:
        KeyboardInterrupt: it was interrupted. UserError: it ended within its warm-up.
    """
    watch, begin = _Watch(), time.perf_counter()
    record = job.train(watch)
    end = time.perf_counter()
    if record.stop_reason == "interrupt":
        raise KeyboardInterrupt
    if len(watch.steps) <= WARMUP:
        raise UserError(
            f"The training ended ({record.stop_reason}) after {counted(len(watch.steps), 'step')}, but the first "
            f"{WARMUP} are warm-up: there is nothing to time."
        )
    steps, warm = watch.steps[WARMUP:], watch.ended[WARMUP - 1]
    samples = [len(step.samples) for step in islice(job.run.stream.steps(), WARMUP, len(watch.steps))]
    spent = sum(step.seconds for step in steps)
    return {
        "stop_reason": record.stop_reason,
        "seconds": end - warm,
        "warmup_seconds": warm - begin,
        "steps": len(steps),
        "warmup_steps": WARMUP,
        "step_seconds": spread([step.seconds for step in steps]),
        "samples_per_second": sum(samples) / spent,
        "tokens_per_second": sum(step.step_processed_tokens for step in steps) / spent,
        "trained_tokens_per_second": sum(step.step_tokens for step in steps) / spent,
        "final_loss": record.loss,
        "final_eval_loss": record.eval_loss,
        "peak_planned": record.memory.peak,
        "peak_allocated": record.memory.peak_allocated,
    }
