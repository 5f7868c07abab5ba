"""The proof's fine-tuning run on one device, while jobs `evaluate` run on another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.proof.children import Children
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.output import LOG, read_log
from wgpu_lora.train.records import RUN, RunRecord
from wgpu_lora.worker.parent import Worker

POLL = 0.05
APART = 1.0  # seconds between the starts of evaluations
# A GPU may be done with a short run while one evaluation still starts, so there several take turns; a software device
# has no cores to spare for that, and its steps are long.
LANES = {"software": 1}
MANY = 3


@dataclass
class Evaluated:
    """An `evaluate` job: its exit code, its result, and the steps taken while it computed."""

    code: int
    result: dict[str, Any]
    said: str
    steps: int
    seconds: float


@dataclass
class Training:
    """What became of it. before: the held-out loss's evaluation on the training device, before any step.

    beside: evaluations on the other device, or afterwards on the same one where there is no other.
    seconds: of the finetune job; record: of the run, None where it left none.
    """

    directory: Path
    code: int
    said: str
    seconds: float
    before: dict[str, Any]
    beside: list[Evaluated]
    devices: list[int]
    log: list[dict[str, Any]] = field(default_factory=list)
    record: RunRecord | None = None


def evaluate_options(args: TrainingArguments, device: int) -> dict[str, Any]:
    """The job `evaluate` that measures what the run calls its held-out loss."""
    same = ("max_length", "on_overflow", "base_dtype", "completion_only_loss", "enable_thinking")
    values = {name: getattr(args, name) for name in same}
    return {"model": args.model, "data": args.eval_data, "device": device, "adapter": args.init_adapter, **values}


def finetune_options(recipe: Path, args: TrainingArguments, output: Path, device: int) -> dict[str, Any]:
    """The job `finetune` of the recipe, with a log line for every step; what is before it is measured apart."""
    place = {"recipe": str(recipe), "output": str(output), "device": str(device)}
    return {**place, "eval_data": args.eval_data, "logging_steps": 1, "eval_on_start": False}


def train(children: Children, recipe: Path, args: TrainingArguments, output: Path, kinds: dict[int, str]) -> Training:
    """Runs it all to its end.

    Args:
        kinds: of each device that is used, by index; the first trains, the second evaluates meanwhile.

    Raises:
        WorkerFailed: the evaluation before it did not end well.
    """
    first, *others = kinds
    before = children.run("evaluate-before", "evaluate", **evaluate_options(args, first))
    begin = time.perf_counter()
    finetune = children.start("finetune", "finetune", **finetune_options(recipe, args, output, first))
    if others:
        beside = list(_meanwhile(children, args, finetune, output / LOG, others[0], LANES.get(kinds[others[0]], MANY)))
    code, seconds = finetune.wait(), time.perf_counter() - begin
    if not others:
        child = children.start("evaluate-after", "evaluate", **evaluate_options(args, first))
        beside = [_evaluated(child, [], time.monotonic())]
    return Training(
        output,
        code,
        finetune.last_words(),
        seconds,
        before,
        beside,
        [first, *others[:1]],
        read_log(output / LOG) if (output / LOG).is_file() else [],
        RunRecord.read(output) if (output / RUN).is_file() else None,
    )


def _meanwhile(
    children: Children, args: TrainingArguments, finetune: Worker, log: Path, device: int, lanes: int
) -> Iterator[Evaluated]:
    """Evaluates on `device` until steps were taken while an evaluation computed, or the run has ended."""
    running: list[Worker] = []
    taken: list[float] = []  # when each step's line was first seen
    started, count, seen = 0.0, 0, False
    while finetune.running() or running:
        now = time.monotonic()
        lines = log.read_bytes().count(b"\n") if log.is_file() else 0
        taken += [now] * (lines - len(taken))
        for child in [child for child in running if not child.running()]:
            running.remove(child)
            done = _evaluated(child, taken, now)
            seen = seen or bool(done.steps) or bool(done.code)
            yield done
        ready = lanes > 1 or taken
        if ready and not seen and finetune.running() and len(running) < lanes and now - started > APART:
            count, started = count + 1, now
            running.append(children.start(f"evaluate-{count}", "evaluate", **evaluate_options(args, device)))
        time.sleep(POLL)


def _evaluated(child: Worker, taken: list[float], now: float) -> Evaluated:
    code = child.wait()
    result = child.last["result"] if code == 0 else {}
    seconds = float(result.get("seconds", 0.0))  # of computing alone, which is the last thing that it does
    steps = sum(now - seconds <= moment <= now for moment in taken)
    return Evaluated(code, result, child.last_words(), steps, seconds)
