"""wgpu-lora bench: bricks, whole runs and batches, measured here and held against what this device can do."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from typing import Annotated, Any

import typer

from wgpu_lora.cli import completion
from wgpu_lora.cli.bench_modes import check_bricks, check_mode
from wgpu_lora.cli.bench_training import max_batch as search_batches
from wgpu_lora.cli.bench_training import training as train
from wgpu_lora.cli.console import Bar, console, is_terminal, line
from wgpu_lora.cli.options import Device
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.names.allowed import COMPUTE_DTYPES
from wgpu_lora.weights.registry import BASE_FORMATS, DEFAULT_FORMAT

WHAT, WITH, RUNS = "What to do", "Model and sizes", "--training and --find-max-batch"
SHAPE = (
    "Named shape of a model, with made-up weights of the real size; for bricks by default tiny-qwen3 on a device that "
    "runs on the CPU and qwen2.5-0.5b on any other."
)
COMPARE = "Two result files, older first: how much each brick's time has changed, and whether that is more than noise."
TOKENS = "Tokens of a training batch of bricks, or of a row of one; of a recipe's rows at most. [x>=2]"
BASE_DTYPE = "How the frozen weights are kept."
COMPUTE_DTYPE = "What training's products round activations to."
TIME_LIMIT = (
    "Seconds of measuring each brick's case, instead of what its contract says; or of running batches that "
    "--find-max-batch finds, with and without checkpointing each (600). [x>0]"
)


def option(text: str, panel: str, *names: str, choices: Collection[str] = (), **settings: Any) -> Any:
    if choices:
        settings |= {"metavar": "|".join(choices), "autocompletion": completion.one_of(choices)}
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


def bench(
    ctx: typer.Context,
    brick: Annotated[
        list[str] | None,
        option("Brick to measure; can be given several times.", WHAT, autocompletion=completion.bricks),
    ] = None,
    everything: Annotated[bool, option("Measure every brick.", WHAT, "--all")] = False,
    listing: Annotated[bool, option("List the bricks and shapes that there are.", WHAT, "--list")] = False,
    compare: Annotated[tuple[str, str] | None, option(COMPARE, WHAT, metavar="OLD NEW")] = None,
    training: Annotated[bool, option("Time the whole training loop, repeatedly.", WHAT, "--training")] = False,
    find_max_batch: Annotated[
        bool, option("Find the largest batch of a training step.", WHAT, "--find-max-batch")
    ] = False,
    shape: Annotated[str | None, option(SHAPE, WITH, autocompletion=completion.shapes)] = None,
    model: Annotated[
        str | None,
        option("Model directory, GGUF file, hub id or 'demo', not a shape.", WITH, autocompletion=completion.MODEL),
    ] = None,
    layers: Annotated[int | None, option("Keep only so many of the model's layers. [x>=1]", WITH)] = None,
    tokens: Annotated[int | None, option(TOKENS, WITH, show_default="512, or the recipe's")] = None,
    rank: Annotated[
        int | None, option("Rank of the adapters. [x>=1]", WITH, show_default="16, or the recipe's")
    ] = None,
    base_dtype: Annotated[
        str | None, option(BASE_DTYPE, WITH, choices=BASE_FORMATS, show_default=f"{DEFAULT_FORMAT}, or the recipe's")
    ] = None,
    compute_dtype: Annotated[
        str | None, option(COMPUTE_DTYPE, WITH, choices=COMPUTE_DTYPES, show_default="f32, or the recipe's")
    ] = None,
    tune: Annotated[
        bool | None, option("Choose tilings as a training run does; by default, unless the recipe says no.", WITH)
    ] = None,
    device: Device = None,
    time_limit: Annotated[float | None, option(TIME_LIMIT, WITH)] = None,
    json: Annotated[str | None, option("File for the results, as JSON lines.", WITH, metavar="FILE")] = None,
    recipe: Annotated[
        str | None,
        option("Recipe to train, by default the demo's; or give --shape.", RUNS, autocompletion=completion.RECIPE),
    ] = None,
    repeat: Annotated[int, option("How often to train. [x>=1]", RUNS)] = 2,
    max_steps: Annotated[int | None, option("Optimizer steps of a training. [x>=3]", RUNS)] = None,
    project: Annotated[
        bool, option("Project --training to models of 1.5B, 3B, 7B and 13B.", RUNS, "--project")
    ] = False,
    data: Annotated[str | None, option("Rows for a recipe that names none.", RUNS)] = None,
    batch: Annotated[int | None, option("Rows of a batch of --training. [x>=1]", RUNS)] = None,
    accumulation: Annotated[int | None, option("Batches of an optimizer step of --training. [x>=1]", RUNS)] = None,
    max_batch: Annotated[
        int | None, option("Rows that --find-max-batch goes to at most; left out, as many as fit. [x>=1]", RUNS)
    ] = None,
    memory_limit: Annotated[int | None, option("Bytes that --find-max-batch may use at most. [x>=1]", RUNS)] = None,
) -> int:
    """Measure bricks, the pieces of training and serving.

    First the device's own ceilings, then for each brick correctness against float64 references, then time. A brick
    passes, or fails, which makes the exit code 1, or is 'noisy': its timings never came to agree, so they show nothing.
    """
    check_mode(ctx)
    if time_limit is not None and not 0 < time_limit < math.inf:
        raise UserError(f"--time-limit is {time_limit:g}: give a number of seconds greater than 0.")
    if listing:
        return _list()
    if compare:
        return _compare(*compare)
    given = {"tokens": tokens, "rank": rank, "base_dtype": base_dtype, "compute_dtype": compute_dtype}
    sizes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if training:
        from wgpu_lora.bench.training import Work

        work = Work(
            recipe, shape, layers, batch=batch, accumulation=accumulation, data=data, model=model, max_steps=max_steps,
            device=device, tune=tune, **sizes,
        )  # fmt: skip
        return train(work, repeat, json, project)
    if find_max_batch:
        from wgpu_lora.bench.max_batch import SECONDS, Batches

        sizes.pop("base_dtype", None)
        batches = Batches(most=max_batch, limit=memory_limit, seconds=time_limit or SECONDS, **sizes)
        return search_batches(model, shape, layers, base_dtype or DEFAULT_FORMAT, device, batches, json)
    if shape and model:
        raise UserError("--shape and --model are both given: leave one of them out.")
    from wgpu_lora.bench.contract import brick_names

    names = brick_names() if everything else list(dict.fromkeys(brick or []))
    check_bricks(ctx, names)  # what is not known is said before a device is opened
    from wgpu_lora.gpu.tuner import wanted

    context = _context(device, shape, model, layers, tune=wanted(tune is not False), **sizes)
    return _measure(context, names, time_limit, json)


def _context(selector: str | None, shape: str | None, model: str | None, layers: int | None, **sizes: Any) -> Any:
    from wgpu_lora.bench.workload import Context
    from wgpu_lora.gpu.device import Device as OpenedDevice
    from wgpu_lora.models.shapes import shape_config

    if shape:
        shape_config(shape, layers)
    return Context.of(OpenedDevice(selector), shape, model, layers, **sizes)


def _measure(context: Any, names: list[str], time_limit: float | None, file: str | None) -> int:
    from wgpu_lora.bench.ceiling import measure_ceilings
    from wgpu_lora.bench.report import KEY, VERDICTS, ceiling_lines, details, noise_text, table
    from wgpu_lora.bench.results import BROKEN, Writer, options_of
    from wgpu_lora.bench.run import ceilings_broken, check_fit, header_of, run_bricks

    for name in names:
        check_fit(context, name)
    writer = Writer(file) if file else None
    info, options = context.device.info, options_of(context)
    line("device", f"{info.name} ({info.driver})")
    tuned = "tuned" if options.pop("tuned") else "not tuned"
    line("model", ", ".join([*(f"{name.replace('_', ' ')} {value}" for name, value in options.items()), tuned]))
    results: list[Any] = []
    with Bar("ceilings", len(names) + 1) as bar:
        bar.advance(to=0)
        if not is_terminal(sys.stdout):
            line("measuring", "the device's ceilings first, then each brick")
        ceilings = measure_ceilings(context.device)
        for label, text in zip(("ceilings", ""), ceiling_lines(ceilings), strict=True):
            line(label, text)
        if writer:
            writer.write(header_of(context, ceilings))
        for result in run_bricks(context, names, ceilings, time_limit, _Begun(bar)):
            results.append(result)
            if writer:
                writer.write(result.record())
            if not is_terminal(sys.stdout):
                line("measured", details(result))
    if is_terminal(sys.stdout):
        for result in results:  # after the bar, which they would tear
            line("measured", details(result))
    console().print()
    console().print(table(results))
    console().print(f"\n{KEY}\n", style="dim")
    for r in results:
        if r.noisy:
            line("noisy", f"{r.label}: {noise_text(r)}")
    broken = ceilings_broken(ceilings) + [f"{r.label}: {text}" for r in results for text in r.broken]
    for text in broken:
        line(VERDICTS[BROKEN], text)
    return 1 if broken else 0


class _Begun(Events):
    """A bar of the bricks that are measured."""

    def __init__(self, bar: Bar):
        self._bar = bar
        self._begun: dict[str, None] = {}

    def measuring(self, brick: str, case: str) -> None:
        self._begun[brick] = None
        self._bar.advance(f"{brick} {case}".strip(), to=len(self._begun))


def _list() -> int:
    from rich.table import Table

    from wgpu_lora.bench.contract import brick_names, load_contract
    from wgpu_lora.models.shapes import SHAPES

    table = Table(box=None, pad_edge=False)
    for column in ("brick", "kind", "covers"):
        table.add_column(column)
    for name in brick_names():
        contract = load_contract(name)
        table.add_row(name, contract.kind, contract.covers)
    console().print(table)
    line("shapes", ", ".join(SHAPES))
    return 0


def _compare(old_file: str, new_file: str) -> int:
    from wgpu_lora.bench.compare import compare, warnings
    from wgpu_lora.bench.report import comparison_table
    from wgpu_lora.bench.results import read_results

    old, new = read_results(old_file), read_results(new_file)
    for text in warnings(old, new):
        line("warning", text)
    found = compare(old[1], new[1])
    if not found:
        raise UserError(f"{old_file} and {new_file} have no brick in common: measure the same ones.")
    console().print(comparison_table(found))
    return 0
