"""wgpu-lora bench training: time and memory of whole training runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli import completion
from wgpu_lora.cli.bench_options import (
    BaseDtypeOr,
    ComputeDtypeOr,
    File,
    Layers,
    Model,
    RankOr,
    Shape,
    TokensOr,
)
from wgpu_lora.cli.console import console, line, table
from wgpu_lora.cli.finetune import speed
from wgpu_lora.cli.options import Device, Goal, InRunLog, Notes
from wgpu_lora.events import Events
from wgpu_lora.train.ending import FINISHED
from wgpu_lora.words import counted

if TYPE_CHECKING:
    from wgpu_lora.bench.results import Writer

# Other programs count either kind of tokens, so both are named.
SPREAD_NAMES = {"tokens_per_second": "processed tokens/s", "trained_tokens_per_second": "trained tokens/s"}
Record = Mapping[str, Any]


def training(
    recipe: Annotated[
        str | None,
        typer.Option(help="Recipe to train, by default the demo's; or use --shape.", autocompletion=completion.RECIPE),
    ] = None,
    shape: Shape = None,
    model: Model = None,
    data: Annotated[str | None, typer.Option(help="Data for a recipe that names none.")] = None,
    layers: Layers = None,
    tokens: TokensOr = None,
    rank: RankOr = None,
    batch: Annotated[int | None, typer.Option(help="Rows per batch. [x>=1]")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Batches per optimizer step. [x>=1]")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps per run. [x>=3]")] = None,
    base_dtype: BaseDtypeOr = None,
    compute_dtype: ComputeDtypeOr = None,
    tune: Annotated[
        bool | None, typer.Option(help="Choose tilings first; by default, unless the recipe turns it off.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Number of runs. [x>=1]")] = 2,
    project: Annotated[bool, typer.Option("--project", help="Project to models of 1.5B, 3B, 7B and 13B.")] = False,
    device: Device = None,
    json: File = None,
    goal: Goal = None,
    notes: Notes = None,
    run_log: InRunLog = True,
) -> int:
    """Time the whole training loop, repeatedly.

    The exit code is 1 if a run did not finish.
    """
    from wgpu_lora.bench.projection import LARGER
    from wgpu_lora.bench.results import Writer
    from wgpu_lora.bench.step import training_options
    from wgpu_lora.bench.training import Work, run_training
    from wgpu_lora.track.recording import remarks

    options = {
        "tokens": tokens, "batch": batch, "accumulation": accumulation, "data": data, "model": model, "rank": rank,
        "base_dtype": base_dtype, "compute_dtype": compute_dtype, "tune": tune, "max_steps": max_steps,
        "device": device,
    }  # fmt: skip
    work = Work(recipe, shape, layers, training_options(options))
    with remarks(goal, notes, run_log):
        found = run_training(work, repeat, _Noted(Writer(json)), shapes=LARGER if project else ())
    if project:
        console().print(table(PROJECTED, map(_projection, found["projections"]), PROJECTED[:1]))
        line("projected", "memory from each model's plan; time from counted operations at the measured rate")
    return 0 if all(run["stop_reason"] in FINISHED for run in found["runs"]) else 1


# -- what is shown -----------------------------------------------------------------------------------------------------

PROJECTED = ("projected for", "memory", "fits here", "operations", "samples/s", "processed tokens/s", "seconds")
SPREAD = ("over the runs", "median", "min", "max", "variance", "spread")


def _show_header(record: Record) -> None:
    device, work = record["device"], record["work"]
    line("device", f"{device['name']}, {device['driver']}, {device['backend']}")
    if "options" in work:  # of a training
        recipe, shape = work["recipe"], work.get("shape")
        name = f"recipe {recipe}" if recipe else f"shape {shape}, {counted(work['layers'], 'layer')}"
        line("work", f"{name}; not counted: {record['excluded']}")


def _show_run(record: Record) -> None:
    from wgpu_lora.train.memory import readable

    memory = f"{readable(record['peak_allocated'])} of {readable(record['peak_planned'])} planned"
    line(
        "run",
        f"{record['number'] + 1}: {record['seconds']:.2f} s, {record['samples_per_second']:,.2f} samples/s, "
        f"{speed(record['trained_tokens_per_second'], record['tokens_per_second'], 1.0)}, "
        f"loss {_number(record['final_loss'])}, memory {memory}; {record['stop_reason']}",
    )


def _show_spread(record: Record) -> None:
    rows = []
    for name, spread in record["spread"].items():
        cv = "one run" if spread["variance"] is None else "" if spread["cv"] is None else f"{spread['cv']:.2%}"
        values = [_number(spread[key]) for key in SPREAD[1:5]]
        rows.append((SPREAD_NAMES.get(name, name.replace("_", " ")), *values, cv))
    console().print(table(SPREAD, rows, SPREAD[:1]))


class _Noted(Events):
    """Writes each record, and shows those of interest."""

    def __init__(self, writer: Writer):
        self._writer = writer

    def measured(self, record: Record) -> None:
        self._writer.write(record)
        if record["kind"] == "header":
            _show_header(record)
        elif record["kind"] == "run":
            _show_run(record)
        elif "spread" in record:
            _show_spread(record)


def _projection(record: Record) -> tuple[str, ...]:
    from wgpu_lora.train.memory import readable

    peak = record["peak_planned"]
    return (
        record["shape"],
        "not possible" if peak is None else readable(peak),
        {True: "yes", False: "no", None: "not known"}[record["fits"]],
        f"{record['times_the_operations']:.1f} x",
        f"{record['samples_per_second']:.3g}",
        f"{record['tokens_per_second']:.3g}",
        f"{record['seconds']:,.0f}",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
