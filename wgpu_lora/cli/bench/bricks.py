"""wgpu-lora bench: bricks and, as separate commands, whole training runs, batch sizes and comparisons of results."""

from __future__ import annotations

import json as json_format
import math
import sys
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli import parameters
from wgpu_lora.cli.bench import BaseDtypeOr, ComputeDtype, File, Layers, Model, Rank, RankOr, Shape, TokensOr
from wgpu_lora.cli.bench.max_batch import max_batch
from wgpu_lora.cli.bench.training import training
from wgpu_lora.cli.command import USED, Command, Group, dashes
from wgpu_lora.cli.console import Bar, console, is_terminal, line, table
from wgpu_lora.cli.parameters import BaseDtype, Device, Goal, InRunLog, Notes, choice, refuse_unused
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.names.choices import COMPUTE_DTYPES
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT

if TYPE_CHECKING:
    from wgpu_lora.bench.brick_results import Writer

ORDERS = ("raw-first", "protected-first")


def protected(
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe to train, with its own settings; by default the demo's, with bf16, 5e-5 and clipping at 1.",
            autocompletion=parameters.RECIPES,
        ),
    ] = None,
    shape: Shape = None,
    model: Model = None,
    data: Annotated[str | None, typer.Option(help="Rows for a recipe or a model, as .jsonl.")] = None,
    layers: Layers = None,
    tokens: TokensOr = None,
    rank: RankOr = None,
    batch: Annotated[int | None, typer.Option(help="Rows per batch. [x>=1]")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Batches per optimizer step. [x>=1]")] = None,
    save_steps: Annotated[int | None, typer.Option(help="Steps between checkpoints. [x>=0]")] = None,
    base_dtype: BaseDtypeOr = None,
    compute_dtype: Annotated[
        str | None,
        choice(
            "Type that the inputs of frozen matmuls are rounded to.",
            COMPUTE_DTYPES,
            show_default="the recipe's, or bf16",
        ),
    ] = None,
    tune: Annotated[
        bool | None, typer.Option(help="Choose tilings first; by default, unless the recipe turns it off.")
    ] = None,
    order: Annotated[
        str | None, choice("Which segment of a row comes first.", ORDERS, show_default="both, one after the other")
    ] = None,
    target_seconds: Annotated[float, typer.Option(help="Seconds of each segment, by the clock. [x>0]")] = 180.0,
    repeat: Annotated[int, typer.Option(help="Rows in each order. [x>=1]")] = 1,
    device: Device = None,
    json: Annotated[Path | None, typer.Option("--json", help="File for the results, as JSON.", metavar="FILE")] = None,
    goal: Goal = None,
    notes: Notes = None,
    run_log: InRunLog = True,
) -> int:
    """Measure what protected training costs, against raw training.

    A row is a raw and a protected training of the same length, one after the other on one device. The protected one has
    a broker in a process of its own, and seals what it writes. 'wgpu-lora report FILE' draws the results beside
    published ones. The exit code is 1 if a row is not clean.
    """
    from wgpu_lora.protect import check_libraries

    check_libraries()
    from wgpu_lora.bench.training_runs import Work
    from wgpu_lora.bench.training_step import training_options
    from wgpu_lora.protect.overhead import measure_overhead
    from wgpu_lora.train.track.run_recorder import remarks

    options = {
        "tokens": tokens, "batch": batch, "accumulation": accumulation, "data": data, "model": model, "rank": rank,
        "base_dtype": base_dtype, "compute_dtype": compute_dtype, "tune": tune, "save_steps": save_steps,
        "device": device,
    }  # fmt: skip
    work = Work(recipe, shape, layers, training_options(options))
    with remarks(goal, notes, run_log):
        orders = (order,) if order else ORDERS
        result = measure_overhead(work, target_seconds, orders, repeat, json, _ProtectedProgress())
    for text in result["interpretation"]:
        line("overhead", text)
    if json:
        line("results", str(json))
    return 0 if all(row["cleanModelArtifact"] for row in result["results"]) else 1


SHOWN = {
    "max_concurrency": "at once", "request_throughput": "requests/s", "output_throughput": "tokens/s",
    "median_ttft_ms": "TTFT p50", "p95_ttft_ms": "p95", "median_tpot_ms": "TPOT p50", "p95_tpot_ms": "p95",
    "median_itl_ms": "ITL p50", "p95_itl_ms": "p95",
}  # fmt: skip


def serve(
    url: Annotated[str, typer.Option(help="Server of OpenAI's API.")] = "http://127.0.0.1:8000",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model to ask; if given several times, in turn. By default, the server's first."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests at each load. [x>=1]")] = 64,
    max_concurrency: Annotated[str, typer.Option(help="Requests at a time, separated by commas.")] = "1,8,32",
    input_len: Annotated[int, typer.Option(help="Words of a prompt. [x>=1]")] = 64,
    output_len: Annotated[int, typer.Option(help="Tokens of an answer. [x>=1]")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    json: File = None,
) -> int:
    """Measure a server under load: throughput, and the time to the first token and between tokens, in milliseconds.

    The figures in --json have the names of 'vllm bench serve'.
    """
    from wgpu_lora.infer.serve.client import ServerClient, measure

    loads = [int(text) for text in max_concurrency.split(",") if text.strip().isdecimal()]
    if not loads or min(num_prompts, input_len, output_len, *loads) < 1:
        raise UserError("--num-prompts, --max-concurrency, --input-len and --output-len must be at least 1.")
    clients = [ServerClient(url, name) for name in model or [""]]
    rows = []
    with Bar("measuring", len(loads)) as bar:
        measure(clients, input_len, 2, len(clients), 1, seed + 1)  # what the server compiles on first use
        for load in loads:
            rows.append(measure(clients, input_len, output_len, num_prompts, load, seed))
            bar.advance()
    console().print(table(list(SHOWN.values()), [[f"{row[name]:,.4g}" for name in SHOWN] for row in rows]))
    if json:
        with open(json, "a", encoding="utf-8") as file:
            file.writelines(json_format.dumps(row) + "\n" for row in rows)
    return 0


class _ProtectedProgress(Events):
    """Shows the device, and each row as soon as it is measured."""

    def measured(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "header":
            device = record["device"]
            line("device", f"{device['name']}, {device['driver']}, {device['backend']}")
            return
        sides = (
            f"{side} {record[f'{side}Steps']:,} steps in {record[f'{side}ElapsedSec']:,.2f} s"
            f" and {record[f'{side}OutsideSec']:,.1f} s outside"
            for side in ("raw", "protected")
        )
        clean = "clean" if record["cleanModelArtifact"] else f"not clean: {'; '.join(record['notClean'])}"
        result = f"{record['overheadPct']:+.2f}%, protecting took {record['protectionSec']:,.2f} s"
        line("row", f"{record['label']}, {record['order']}: {', '.join(sides)}; {result}; {clean}")


BRICKS = "bricks"
FLAGS = {"--compare": "compare", "--training": "training", "--find-max-batch": "max-batch"}  # former flags
PROTECTED = "--protected"  # another name of that command


class Bench(Group):
    """Without a command, the options are those of `bricks`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flag = next((arg for arg in args if dashes(arg) in FLAGS), None)
        if PROTECTED in args:
            args = [PROTECTED[2:], *(arg for arg in args if arg != PROTECTED)]
        elif flag:
            command = FLAGS[dashes(flag)]
            args = [command, *(arg for arg in args if arg != flag)]
            if not ctx.resilient_parsing:
                typer.echo(f"wgpu-lora: note: {dashes(flag)} is now a command: 'wgpu-lora bench {command}'", err=True)
        elif not args or args[0].startswith("-"):
            args = args if "--help" in args or "-h" in args or (ctx.resilient_parsing and not args) else [BRICKS, *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.commands[BRICKS].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        if incomplete.startswith("-"):
            return self.commands[BRICKS].shell_complete(ctx, incomplete)
        return super().shell_complete(ctx, incomplete)


class Bricks(Command):
    """The command of which only the options are typed."""

    def extra(self, ctx: Any, word: str) -> str:
        typed = next(iter(ctx.meta[USED].values()), None)
        if typed and dashes(word) in ctx.parent.command.commands:
            return f"'{ctx.parent.command_path}' was given --{typed} and the command {dashes(word)}: leave one out."
        return super().extra(ctx, word)


bench = typer.Typer(
    cls=Bench,
    name="bench",
    help="""Measure bricks (parts of training and serving), whole training runs, or batch sizes.

    First the device's ceilings are measured, then for each brick its correctness against float64 references and its
    time. A brick passes, fails (exit code 1), or is 'noisy' if its timings vary too much to tell.
    """,
    rich_markup_mode=None,
)
bench.command(cls=Command)(training)
bench.command("max-batch", cls=Command)(max_batch)
bench.command(cls=Command)(protected)
bench.command(cls=Command)(serve)


@bench.command(BRICKS, cls=Bricks, hidden=True)
def bricks(
    ctx: typer.Context,
    brick: Annotated[
        list[str] | None,
        typer.Option(help="Brick to measure; may be given several times.", autocompletion=parameters.bricks),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Measure every brick that the model has.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the bricks and shapes.")] = False,
    shape: Shape = None,
    model: Model = None,
    layers: Layers = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a training batch. [x>=8]")] = 512,
    rank: Rank = 16,
    base_dtype: BaseDtype = DEFAULT_FORMAT,
    compute_dtype: ComputeDtype = "f32",
    tune: Annotated[bool, typer.Option(help="Choose tilings as a training run does.")] = True,
    retune: Annotated[bool, typer.Option("--retune", help="Time all tilings again, for at most 5 minutes.")] = False,
    device: Device = None,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Seconds to measure each case of a brick, instead of its contract's. [x>0]"),
    ] = None,
    json: File = None,
    goal: Goal = None,
    notes: Notes = None,
    run_log: InRunLog = True,
) -> int:
    """Measure bricks: correctness first, then time, relative to the device's ceilings.

    Without --shape or --model: tiny-qwen3 on a device that runs on the CPU, qwen2.5-0.5b on any other.
    """
    if [bool(brick), everything, listing].count(True) != 1:
        raise UserError(
            "Give exactly one of --brick NAME, --all and --list, or a command: compare, max-batch, training."
        )
    if listing:
        refuse_unused(ctx, ctx.params.keys() - {"listing"}, "with --list")
        return _list()
    if time_limit is not None and not 0 < time_limit < math.inf:
        raise UserError(f"--time-limit is {time_limit:g}: give a number of seconds greater than 0.")
    if shape and model:  # checked before a device is opened
        raise UserError("--model and --shape are both given: leave one of them out.")
    from wgpu_lora.bench.contract import OPTIONS, brick_names, load_contract
    from wgpu_lora.gpu.tuner import tuning_enabled
    from wgpu_lora.train.track.run_recorder import remarks

    names = brick_names() if everything else list(dict.fromkeys(brick or []))
    options = {option for name in names for option in load_contract(name).options}
    untuned = set() if "tune" in options else {"retune"}
    refuse_unused(ctx, set(OPTIONS) - options | untuned, f"with the brick{'s' * (len(names) > 1)} {', '.join(names)}")
    if retune and not tuning_enabled(tune):
        raise UserError("--retune does nothing with --no-tune or WGPU_LORA_NO_TUNE: leave one of them out.")
    sizes = {
        "tokens": tokens,
        "rank": rank,
        "compute_dtype": compute_dtype,
        "tune": tuning_enabled(tune),
        "retune": retune,
    }
    with remarks(goal, notes, run_log):
        context = _context(device, shape, model, layers, base_dtype, sizes)
        return _measure(context, None if everything else names, time_limit, json)


def _context(
    selector: str | None, shape: str | None, model: str | None, layers: int | None, base_dtype: str, sizes: Any
) -> Any:
    from wgpu_lora.bench.brick import Context
    from wgpu_lora.gpu.device import Device as OpenedDevice
    from wgpu_lora.models.published_shapes import shape_config

    if shape:
        shape_config(shape, layers)  # refuses unknown shapes before a device is opened
    return Context.of(OpenedDevice(selector), shape, model, layers, base_dtype, **sizes)


def _measure(context: Any, names: list[str] | None, time_limit: float | None, file: str | None) -> int:
    """names: of bricks; None: all that the model has."""
    from wgpu_lora.bench.brick_results import BROKEN, Writer
    from wgpu_lora.bench.brick_run import bench as run_bricks
    from wgpu_lora.bench.bricks import bricks_of
    from wgpu_lora.cli.bench.brick_tables import (
        COLUMNS,
        KEY,
        LEFT,
        STYLES,
        UNTUNED,
        VERDICTS,
        cells,
        details,
        noise_text,
    )

    names = names or bricks_of(context.config)
    info, options = context.device.info, context.options()
    line("device", f"{info.name} ({info.driver})")
    tuned = "tuned" if options.pop("tuned") else "not tuned"
    line("model", ", ".join([*(f"{name.replace('_', ' ')} {value}" for name, value in options.items()), tuned]))
    with Writer(file) as writer, Bar("ceilings", len(names) + 1) as bar:
        bar.advance(to=0)
        if not is_terminal(sys.stdout):
            line("measuring", "the device's ceilings first, then each brick")
        results, broken = run_bricks(context, names, time_limit, _BrickProgress(bar, writer))
    for result in results if is_terminal(sys.stdout) else ():
        line("measured", details(result))
    console().print()
    console().print(table(COLUMNS, map(cells, results), LEFT, [STYLES[result.verdict] for result in results]))
    console().print(f"\n{KEY}\n", style="dim")
    for result in results:
        if result.noisy:
            line("noisy", f"{result.label}: {noise_text(result)}")
    for result in results:
        if context.tune and not result.options["tuned"]:
            line("tilings", f"{result.label}: {UNTUNED}")
    for text in broken:
        line(VERDICTS[BROKEN], text)
    return 1 if broken else 0


class _BrickProgress(Events):
    """Writes each record; shows the ceilings, a progress bar and, where a line does not break that, each result."""

    def __init__(self, bar: Bar, writer: Writer):
        self._bar, self._writer = bar, writer
        self._bricks: dict[str, None] = {}

    def measuring(self, brick: str, case: str) -> None:
        self._bricks[brick] = None
        self._bar.advance(f"{brick} {case}".strip(), to=len(self._bricks))

    def measured(self, record: Mapping[str, Any]) -> None:
        from wgpu_lora.bench.brick_results import Result
        from wgpu_lora.bench.device_ceilings import Ceilings
        from wgpu_lora.cli.bench.brick_tables import ceiling_lines, details

        self._writer.write(record)
        if record["kind"] == "header":
            for label, text in zip_longest(["ceilings"], ceiling_lines(Ceilings(**record["ceilings"])), fillvalue=""):
                line(label, text)
        elif not is_terminal(sys.stdout):
            line("measured", details(Result.of(record)))


def _list() -> int:
    from wgpu_lora.bench.contract import brick_names, load_contract
    from wgpu_lora.models.published_shapes import SHAPES

    contracts = map(load_contract, brick_names())
    columns = ("brick", "kind", "covers")
    console().print(table(columns, ((c.name, c.kind, c.covers) for c in contracts), columns))
    line("shapes", ", ".join(SHAPES))
    return 0


@bench.command(cls=Command)
def compare(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE FILE...", help="Result files of 'bench --json', the oldest first.")
    ],
) -> int:
    """Compare result files of any kind, and across devices.

    Two files of bricks: how much each brick's time has changed, and whether that exceeds the noise. Other files, or
    more: what each has measured, in one table.
    """
    from wgpu_lora.bench.brick_results import NAME
    from wgpu_lora.bench.result_comparison import KINDS, differences, read_measured
    from wgpu_lora.cli.bench.brick_tables import comparing_cells

    if len(files) < 2:
        raise UserError("There is nothing to compare: give at least two result files.")
    result = [read_measured(file) for file in files]
    if len(result) == 2 and all(file.kind == KINDS[NAME] for file in result):
        return _compare_bricks(*files)
    names = _names(files)
    for name, file in zip(names, result, strict=True):
        line("file", f"{name}: {file.kind}, {file.device}{f', {file.time}' if file.time else ''}")
    for text in differences(result):
        line("differs", text)
    labels = dict.fromkeys(label for file in result for label in file.figures)
    has_pair = len(result) == 2
    rows = [comparing_cells(label, [file.figures.get(label) for file in result], has_pair) for label in labels]
    columns = ("measured", *names, *(["new / old"] if has_pair else []))
    console().print(table(columns, rows, columns[:1]))
    return 0


def _names(files: list[str]) -> list[str]:
    """The files' names without directories, or the paths where these are alike."""
    names = [Path(file).stem for file in files]
    return names if len(set(names)) == len(names) else files


def _compare_bricks(before: str, now: str) -> int:
    from wgpu_lora.bench.brick_results import compare as compared
    from wgpu_lora.bench.brick_results import read_results, warnings
    from wgpu_lora.cli.bench.brick_tables import LEFT, comparison_cells

    old, new = read_results(before), read_results(now)
    for text in warnings(old, new):
        line("warning", text)
    result = compared(old[1], new[1])
    if not result:
        raise UserError(f"{before} and {now} have no brick in common: measure the same ones.")
    columns = ("brick", "old", "new", "new / old", "verdict")
    console().print(table(columns, map(comparison_cells, result), LEFT))
    return 0
