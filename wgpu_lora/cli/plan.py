"""wgpu-lora plan: the memory of a run, to the byte, without allocating it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli import completion
from wgpu_lora.cli.console import console, line, print_json
from wgpu_lora.cli.describing import (
    describe_model,
    describe_modules,
    describe_optimizer,
    describe_runs,
    modules_of,
    note_unified,
)
from wgpu_lora.cli.finetune import Adapters, AdaptersConfig, BatchTokens, Schedule
from wgpu_lora.cli.options import Json
from wgpu_lora.cli.projecting import Measure, PricePerHour, as_facts, show_projection
from wgpu_lora.errors import UserError
from wgpu_lora.train.options.arguments import TrainingArguments

if TYPE_CHECKING:
    from wgpu_lora.train.job import Job


Shape = Annotated[
    str | None,
    typer.Option(
        help="A named shape, such as qwen3.5-9b, with rows of --max-length tokens, instead of --model and --data.",
        autocompletion=completion.shapes,
    ),
]


def plan(
    args: TrainingArguments,
    note: str | None,
    adapters: Adapters = None,
    adapters_config: AdaptersConfig = None,
    schedule: Schedule = "synchronized",
    batch_tokens: BatchTokens = None,
    shape: Shape = None,
    measure: Measure = False,
    price_per_hour: PricePerHour = None,
    as_json: Json = False,
) -> int:
    """Show the memory that a run needs.

    The options are those of 'finetune'. Nothing is allocated, unless --measure is given.
    """
    from wgpu_lora.share import budget_bytes
    from wgpu_lora.train.measuring import check_price
    from wgpu_lora.train.measuring import measure as measured
    from wgpu_lora.train.memory import both, readable, ways_to_fit, without_a_way

    check_price(price_per_hour)
    if price_per_hour is not None and not measure:
        raise UserError("--price-per-hour does nothing without --measure: give both.")
    several = bool(adapters or adapters_config)
    job = job_of(args, adapters, adapters_config, schedule, batch_tokens, shape)
    session, memory = job.session, job.session.memory()
    budget = budget_bytes(session.device.info, args.budget())
    available = budget.bytes
    fits = available is None or memory.guarded <= available
    ways = [] if available is None or fits else ways_to_fit(available, job.run.args, job.replan)
    buckets = sorted(session.steps)
    steps = [run.stream.total_steps() for run in job.runs]
    named = zip(job.runs, steps, strict=True)
    [modules_of(run) for run in job.runs]
    projection = measured(job) if measure else None
    if as_json:
        print_json(
            {
                "groups": memory.groups,
                "training": memory.training,
                "loading": memory.loading,
                "peak": memory.peak,
                "host": memory.host,
                "optimizer_state": session.optimizer.state_bytes,
                "available": available,
                "fits": fits,
                "ways": [asdict(way) for way in ways],
                "modules": {run.adapter_name: modules_of(run) for run in job.runs}
                if several
                else modules_of(job.runs[0]),
                "buckets": [
                    {"tokens": tokens, "activations": session.steps[tokens].program.plan().nbytes} for tokens in buckets
                ],
                "steps": {run.adapter_name: count for run, count in named} if several else steps[0],
                **({"projection": as_facts(projection, price_per_hour)} if projection else {}),
            }
        )
        return 0
    from rich.table import Table

    if note:
        line("recipe", note)
    describe_model(job)
    describe_runs(job)
    describe_modules(job)
    describe_optimizer(job)
    table = Table(box=None, pad_edge=False)
    table.add_column("memory")
    table.add_column("bytes", justify="right")
    table.add_column("", justify="right")
    sums = {"during training": memory.training, "during loading": memory.loading, "at peak": memory.peak}
    rows = [*memory.groups.items(), *sums.items()]
    for name, nbytes in rows:
        table.add_row(name, f"{nbytes:,}", readable(nbytes))
    if memory.host:
        table.add_row("in the host's memory", f"{memory.host:,}", readable(memory.host))
    console().print(table)
    note_unified(memory)
    for tokens in buckets:
        line(
            "batch",
            f"of up to {tokens:,} tokens: {readable(session.steps[tokens].program.plan().nbytes)} of activations",
        )
    known = budget.source if available is None else f"{readable(available)}: {budget.source}"
    verdict = "" if available is None else "; it fits" if fits else "; it does not fit"
    advice = ""
    if available and not fits and not ways:
        advice = f"; {without_a_way(memory.groups['base'], available, job.run.args, job.replan)}"
    line("budget", f"{known}{verdict}{advice}")
    for way in ways:
        line("would fit", f"with {way.options}: {both(way.peak)}")
    if projection:
        show_projection(projection, price_per_hour)
    return 0


def job_of(
    args: TrainingArguments,
    pairs: list[str] | None,
    config: Path | None,
    schedule: str,
    batch_tokens: int | None,
    shape: str | None,
) -> Job[Any]:
    """The job of a run that is not started."""
    if shape:
        if pairs or config:
            raise UserError("--shape plans one adapter: leave out --adapters and --adapters-config.")
        from wgpu_lora.train.made_up import job_of_shape

        return job_of_shape(shape, args)
    if not (pairs or config):
        from wgpu_lora.train.finetune import prepare_job

        return prepare_job(args, planning=True)
    from wgpu_lora.train.pipeline import prepare_pipeline
    from wgpu_lora.train.tasks import named_tasks

    return prepare_pipeline(args, named_tasks(pairs or [], config), schedule, batch_tokens, planning=True)
