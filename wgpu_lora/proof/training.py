"""The proof's fine-tuning run on one device, next to evaluations on another."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.proof.children import Children
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.train.output import LOG, read_log
from wgpu_lora.train.records import RUN, RunRecord
from wgpu_lora.worker.parent import Worker, WorkerFailed

POLL = 0.05  # seconds


@dataclass
class Evaluated:
    """An evaluation: its result, and the optimizer steps that ended while it computed; or why it failed."""

    result: dict[str, Any]
    steps: int
    failed: str | None = None


@dataclass
class Training:
    """The fine-tuning run and the evaluations around it, whether they succeeded or not.

    code, said: exit code and last words of the finetune job. record: None if it left none.
    before: the held-out loss on the training device, before any step.
    beside: evaluations on the other device, or afterwards on the same one if there is no other.
    """

    directory: Path
    code: int
    said: str
    before: dict[str, Any]
    beside: list[Evaluated]
    devices: list[int]
    log: list[dict[str, Any]]
    record: RunRecord | None


def evaluate_options(args: TrainingArguments, device: int) -> dict[str, Any]:
    """Options of an `evaluate` job that measures the run's held-out loss."""
    same = ("model", "max_length", "on_overflow", "base_dtype", "completion_only_loss", "enable_thinking")
    values = {name: getattr(args, name) for name in same}
    return {"data": args.eval_data, "device": device, "adapter": args.init_adapter, **values}


def finetune_options(recipe: Path, args: TrainingArguments, output: Path, device: int) -> dict[str, Any]:
    """Options of a `finetune` job of the recipe that logs every step; the loss before it is measured separately."""
    place = {"recipe": str(recipe), "output": str(output), "device": str(device)}
    return {**place, "eval_data": args.eval_data, "logging_steps": 1, "eval_on_start": False}


def train(children: Children, recipe: Path, args: TrainingArguments, output: Path, devices: list[int]) -> Training:
    """Trains on the first device, and evaluates meanwhile on the second; on a single device, afterwards.

    Raises:
        WorkerFailed: the evaluation before the run failed.
    """
    devices = devices[:2]
    first, last = devices[0], devices[-1]
    before = children.run("evaluate-before", "evaluate", **evaluate_options(args, first))
    options = finetune_options(recipe, args, output, first)
    finetune = None if last != first else children.start("finetune", "finetune", **options)
    if finetune:
        finetune.wait()
    with children.start("evaluate", "evaluate", asked=True, turns=True, **evaluate_options(args, last)) as evaluate:
        with suppress(WorkerFailed):  # then evaluating fails too
            evaluate.ask("prepare")
        finetune = finetune or children.start("finetune", "finetune", **options)
        beside = list(evaluations(evaluate, finetune))
    code = finetune.wait()
    log = read_log(output / LOG) if (output / LOG).is_file() else []
    record = RunRecord.read(output) if (output / RUN).is_file() else None
    return Training(output, code, finetune.last_words(), before, beside, devices, log, record)


def evaluations(evaluate: Worker, finetune: Worker) -> Iterator[Evaluated]:
    """Evaluates until steps ended while an evaluation computed, or until training has ended; at least once."""
    steps, training = 0, True
    while training and not steps:
        while (training := finetune.running()) and not step_times(finetune):
            time.sleep(POLL)
        try:
            result = evaluate.ask("evaluate")
        except WorkerFailed as error:
            yield Evaluated({}, 0, str(error))
            return
        now = time.time()  # computing is the last thing that an evaluation does
        steps = sum(now - result["seconds"] <= moment <= now for moment in step_times(finetune))
        yield Evaluated(result, steps)


def step_times(worker: Worker) -> list[float]:
    """When a worker's steps ended, in seconds since the epoch."""
    lines = worker.log.read_bytes().splitlines(keepends=True) if worker.log.is_file() else []
    events = [json.loads(line) for line in lines if line.endswith(b"\n")]  # the last may be incomplete
    return [event["time"] for event in events if event["event"] == "step"]
