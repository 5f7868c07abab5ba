"""wgpu-lora plan: the memory of a run, to the byte, without allocating it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli import parameters
from wgpu_lora.cli.console import console, line, print_json, table
from wgpu_lora.cli.finetune import Adapters, AdaptersConfig, BatchTokens, Schedule, job_of
from wgpu_lora.cli.parameters import Json, training_arguments
from wgpu_lora.cli.run_summary import (
    describe_model,
    describe_modules,
    describe_optimizer,
    describe_runs,
    modules_of,
    note_unified,
)
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import duration

if TYPE_CHECKING:
    from wgpu_lora.train.time_estimate import Projection


Shape = Annotated[
    str | None,
    typer.Option(
        help="A named shape, such as qwen3.5-9b, with rows of --max-length tokens, instead of --model and --data.",
        autocompletion=parameters.shapes,
    ),
]


def plan(
    ctx: typer.Context,
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
    from wgpu_lora.gpu.memory_leases import budget_bytes
    from wgpu_lora.train.memory import fitting_suggestions, format_bytes, format_bytes_exact, no_fit_advice
    from wgpu_lora.train.time_estimate import check_price, project_time

    check_price(price_per_hour)
    if price_per_hour is not None and not measure:
        raise UserError("--price-per-hour does nothing without --measure: give both.")
    args, note = training_arguments(ctx)
    multi_adapter = bool(adapters or adapters_config)
    job = job_of(args, adapters, adapters_config, schedule, batch_tokens, planning=True, shape=shape)
    session, memory = job.session, job.session.memory()
    budget = budget_bytes(session.device.info, args.budget())
    available = budget.bytes
    fits = available is None or memory.peak_device_bytes <= available
    ways = [] if available is None or fits else fitting_suggestions(available, job.run.args, job.replan)
    buckets = sorted(session.steps)
    steps = [run.stream.total_steps() for run in job.runs]
    run_steps = zip(job.runs, steps, strict=True)
    [modules_of(run) for run in job.runs]
    projection = project_time(job) if measure else None
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
                if multi_adapter
                else modules_of(job.runs[0]),
                "buckets": [
                    {"tokens": tokens, "activations": session.steps[tokens].program.plan().nbytes} for tokens in buckets
                ],
                "steps": {run.adapter_name: count for run, count in run_steps} if multi_adapter else steps[0],
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
        table.add_row(name, f"{nbytes:,}", format_bytes(nbytes))
    if memory.host:
        table.add_row("in the host's memory", f"{memory.host:,}", format_bytes(memory.host))
    console().print(table)
    note_unified(memory)
    for tokens in buckets:
        line(
            "batch",
            f"of up to {tokens:,} tokens: {format_bytes(session.steps[tokens].program.plan().nbytes)} of activations",
        )
    available_text = budget.source if available is None else f"{format_bytes(available)}: {budget.source}"
    verdict = "" if available is None else "; it fits" if fits else "; it does not fit"
    advice = ""
    if available and not fits and not ways:
        advice = f"; {no_fit_advice(memory.groups['base'], available, job.run.args, job.replan)}"
    line("budget", f"{available_text}{verdict}{advice}")
    for way in ways:
        line("would fit", f"with {way.options}: {format_bytes_exact(way.peak)}")
    if projection:
        show_projection(projection, price_per_hour)
    return 0


Measure = Annotated[bool, typer.Option("--measure", help="Take a few steps, and project the time of the run.")]
PricePerHour = Annotated[float | None, typer.Option(help="Price of an hour on this device, for the cost of the run.")]


def show_projection(projection: Projection, price: float | None) -> None:
    """Print the stages of a run with their seconds and cost."""
    head = ("stage", "seconds", "share", *(() if price is None else ("cost",)))
    rows = [_row(stage, seconds, projection, price) for stage, seconds in projection.stages.items()]
    console().print(table(head, [*rows, _row("all", projection.total, projection, price)], ["stage"]))
    line("projected", f"{duration(projection.total)}, from {projection.timed} measured steps; saving is not counted")


def _row(stage: str, seconds: float, projection: Projection, price: float | None) -> tuple[str, ...]:
    cost = () if price is None else (f"{seconds / 3600 * price:,.4g}",)
    return stage, f"{seconds:,.1f}", f"{seconds / max(projection.total, 1e-9):.0%}", *cost


def as_facts(projection: Projection, price: float | None) -> dict[str, Any]:
    """A projection for JSON."""
    cost = {} if price is None else {"cost": projection.cost(price)}
    return {"stages": projection.stages, "seconds": projection.total, "timed_steps": projection.timed, **cost}
