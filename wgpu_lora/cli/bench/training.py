"""wgpu-lora bench training: time and memory of whole training runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli import parameters
from wgpu_lora.cli.bench import BaseDtypeOr, ComputeDtypeOr, File, Layers, Model, RankOr, Shape, TokensOr
from wgpu_lora.cli.console import console, line, table
from wgpu_lora.cli.finetune import speed
from wgpu_lora.cli.parameters import Device, Goal, InRunLog, Notes, refuse_unused
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.run.stop_reasons import FINISHED

if TYPE_CHECKING:
    from wgpu_lora.bench.brick_results import Writer

# Other programs count either kind of tokens, so both are named.
SPREAD_NAMES = {"tokens_per_second": "processed tokens/s", "trained_tokens_per_second": "trained tokens/s"}
Record = Mapping[str, Any]


def training(
    ctx: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Option(help="Recipe to train, by default the demo's; or use --shape.", autocompletion=parameters.RECIPES),
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
    epochs: Annotated[float | None, typer.Option(help="Epochs per run, instead of steps. [x>0]")] = None,
    base_dtype: BaseDtypeOr = None,
    compute_dtype: ComputeDtypeOr = None,
    tune: Annotated[
        bool | None, typer.Option(help="Choose tilings first; by default, unless the recipe turns it off.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Number of runs. [x>=1]")] = 2,
    max_spread: Annotated[
        str | None, typer.Option(help="Fail if the runs' time or speed vary by more than this, for example 1%.")
    ] = None,
    search_batch: Annotated[
        bool,
        typer.Option("--search-batch", help="Time all batches and accumulations of the same product, instead."),
    ] = False,
    project: Annotated[bool, typer.Option("--project", help="Project to models of 1.5B, 3B, 7B and 13B.")] = False,
    device: Device = None,
    json: File = None,
    summary: Annotated[str | None, typer.Option(help="Markdown file for a summary.", metavar="FILE")] = None,
    goal: Goal = None,
    notes: Notes = None,
    run_log: InRunLog = True,
) -> int:
    """Time the whole training loop, repeatedly.

    The exit code is 1 if a run did not finish, or if the runs vary by more than --max-spread.
    """
    from wgpu_lora.bench.batch_search import search_pairs
    from wgpu_lora.bench.brick_results import Writer
    from wgpu_lora.bench.larger_models import GRADES, LARGER
    from wgpu_lora.bench.training_runs import Work, run_training, summary_text
    from wgpu_lora.bench.training_step import training_options
    from wgpu_lora.train.track.run_recorder import remarks

    options = {
        "tokens": tokens, "batch": batch, "accumulation": accumulation, "data": data, "model": model, "rank": rank,
        "base_dtype": base_dtype, "compute_dtype": compute_dtype, "tune": tune, "max_steps": max_steps,
        "epochs": epochs, "device": device,
    }  # fmt: skip
    work = Work(recipe, shape, layers, training_options(options))
    limit, shapes = _share(max_spread), LARGER if project else ()
    if search_batch:
        refuse_unused(ctx, {"max_spread", "project", "summary"}, "with --search-batch")
    with Writer(json) as records, Writer(summary, "--summary") as report, remarks(goal, notes, run_log):
        if search_batch:
            return _show_pairs(search_pairs(work, repeat, _Noted(records)))
        result = run_training(work, repeat, _Noted(records), shapes=shapes, max_spread=limit)
        report.text(summary_text(result))
    if project:
        console().print(table(PROJECTED, map(_projection, result["projections"]), PROJECTED[:2]))
        line("projected", "memory from each model's plan; time from counted operations at the measured rate")
        line("tokens/s", "processed tokens, including padding")
        line("grades", f"share of the budget: {', '.join(f'{name} up to {part:.0%}' for name, part in GRADES)}")
    gate = result["summary"]["gate"]
    finished = all(run["stop_reason"] in FINISHED for run in result["runs"])
    return 0 if finished and (gate is None or gate["passed"]) else 1


def _share(text: str | None) -> float | None:
    """A share such as 1% or 0.01."""
    if text is None:
        return None
    try:
        value = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise UserError(f"--max-spread must be a share between 0 and 1, such as 1% or 0.01, not {text!r:.80}.")
    return value


# -- what is shown -----------------------------------------------------------------------------------------------------

PROJECTED = ("projected for", "grade", "memory", "operations", "samples/s", "tokens/s", "seconds")
PAIRS = ("batch", "accumulation", "samples/s", "to the first", "planned", "status")
SPREAD = ("over the runs", "median", "min", "max", "variance", "spread")


def _show_header(record: Record) -> None:
    device, work = record["device"], record["work"]
    line("device", f"{device['name']}, {device['driver']}, {device['backend']}")
    if "options" in work:  # of a training
        recipe, shape = work["recipe"], work.get("shape")
        name = f"recipe {recipe}" if recipe else f"shape {shape}, {count_noun(work['layers'], 'layer')}"
        line("work", f"{name}; not counted: {record['excluded']}")


def _show_run(record: Record) -> None:
    from wgpu_lora.train.memory import format_bytes

    number = record["number"] + 1
    if record["error"]:
        progress = f"{record['done_steps']:,} of {count_noun(record['planned_steps'], 'step')}"
        line("run", f"{number}: failed after {progress}: {record['error']}")
        return
    memory = f"{format_bytes(record['peak_allocated'])} of {format_bytes(record['peak_planned'])} planned"
    line(
        "run",
        f"{number}: {record['seconds']:.2f} s, {record['samples_per_second']:,.2f} samples/s, "
        f"{speed(record['trained_tokens_per_second'], record['tokens_per_second'], 1.0)}, "
        f"loss {_number(record['final_loss'])}, memory {memory}; "
        f"{record['done_steps']:,} of {count_noun(record['planned_steps'], 'step')}: {record['stop_reason']}",
    )


def _show_summary(record: Record) -> None:
    from wgpu_lora.bench.training_runs import gate_text, memory_text, steps_text

    _show_spread(record)
    line("steps", steps_text(record))
    line("memory", memory_text(record["memory"]))
    for error in record["errors"]:
        line("error", error)
    if record["gate"]:
        line("passed" if record["gate"]["passed"] else "failed", gate_text(record["gate"]))


def _show_pairs(record: Record) -> int:
    from wgpu_lora.train.memory import format_bytes

    pairs, fastest = record["pairs"], record["fastest"]
    first = next((pair["samples_per_second"] for pair in pairs if pair["samples_per_second"]), None)
    rows = [
        (
            str(pair["batch"]),
            str(pair["accumulation"]),
            _number(pair["samples_per_second"]),
            f"{pair['samples_per_second'] / first:.3f}" if first and pair["samples_per_second"] else "",
            "" if pair["peak_planned"] is None else format_bytes(pair["peak_planned"]),
            pair["status"],
        )
        for pair in pairs
    ]
    console().print(table(PAIRS, rows, PAIRS[-1:], ["green" if pair is fastest else None for pair in pairs]))
    for pair in pairs:
        if pair["why"]:
            line(pair["status"], f"{pair['batch']} x {pair['accumulation']}: {pair['why']}")
    if fastest:
        line("fastest", f"--batch {fastest['batch']} --accumulation {fastest['accumulation']}")
    return 0 if fastest else 1


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
            _show_summary(record)


def _projection(record: Record) -> tuple[str, ...]:
    from wgpu_lora.train.memory import format_bytes

    peak = record["peak_planned"]
    return (
        record["shape"],
        record["grade"],
        "not possible" if peak is None else format_bytes(peak),
        f"{record['times_the_operations']:.1f} x",
        f"{record['samples_per_second']:.3g}",
        f"{record['tokens_per_second']:.3g}",
        f"{record['seconds']:,.0f}",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
