"""wgpu-lora bench --protected: what protected training costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from wgpu_lora.cli import completion
from wgpu_lora.cli.bench_options import BaseDtypeOr, Layers, Model, RankOr, Shape, TokensOr
from wgpu_lora.cli.console import line
from wgpu_lora.cli.options import Device, Goal, InRunLog, Notes, choice
from wgpu_lora.events import Events
from wgpu_lora.names.allowed import COMPUTE_DTYPES

ORDERS = ("raw-first", "protected-first")


def protected(
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe to train, with its own settings; by default the demo's, with bf16, 5e-5 and clipping at 1.",
            autocompletion=completion.RECIPE,
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
    from wgpu_lora.protect.extra import check_libraries

    check_libraries()
    from wgpu_lora.bench.step import training_options
    from wgpu_lora.bench.training import Work
    from wgpu_lora.protect.bench import Measuring, bench_protected
    from wgpu_lora.track.recording import remarks

    options = {
        "tokens": tokens, "batch": batch, "accumulation": accumulation, "data": data, "model": model, "rank": rank,
        "base_dtype": base_dtype, "compute_dtype": compute_dtype, "tune": tune, "save_steps": save_steps,
        "device": device,
    }  # fmt: skip
    work = Work(recipe, shape, layers, training_options(options))
    with remarks(goal, notes, run_log):
        found = bench_protected(Measuring(work, target_seconds, (order,) if order else ORDERS, repeat), json, _Shown())
    for text in found["interpretation"]:
        line("overhead", text)
    if json:
        line("results", str(json))
    return 0 if all(row["cleanModelArtifact"] for row in found["results"]) else 1


class _Shown(Events):
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
        found = f"{record['overheadPct']:+.2f}%, protecting took {record['protectionSec']:,.2f} s"
        line("row", f"{record['label']}, {record['order']}: {', '.join(sides)}; {found}; {clean}")
