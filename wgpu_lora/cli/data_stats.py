"""wgpu-lora data stats: what the rows of a run are, and what its options make of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli import completion
from wgpu_lora.cli.console import Bar, console, line, print_json, table
from wgpu_lora.cli.options import Json
from wgpu_lora.cli.projecting import PricePerHour, as_facts, show_projection
from wgpu_lora.errors import UserError
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.words import counted, share

if TYPE_CHECKING:
    from wgpu_lora.train.row_statistics import Choice, RowStatistics

CHOICES = ("max length", "packing", "rows cut", "rows lost", "trained tokens kept", "padding", "steps an epoch")


def stats(
    args: TrainingArguments,
    note: str | None,
    page: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("data-stats.html"),
    measure: Annotated[bool, typer.Option(help="Take a few steps, and project the time of the run.")] = True,
    price_per_hour: PricePerHour = None,
    project: Annotated[
        list[str] | None,
        typer.Option(
            help="Project the time to this shape of model, too; may be repeated.",
            metavar="SHAPE",
            autocompletion=completion.shapes,
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show token lengths, formats and batches of training rows, and the time and cost of training on them.

    The options are those of 'finetune'. Prints tables and writes a page with plots. Lengths are counted after the chat
    template. The time is projected from a few steps on this device, of which nothing is kept.
    """
    from wgpu_lora.bench.projection import project as projected
    from wgpu_lora.models.loaded import open_model
    from wgpu_lora.models.shapes import shape_config
    from wgpu_lora.report.data_page import check_page, write_page
    from wgpu_lora.train.finetune import prepare_job, with_demo_data
    from wgpu_lora.train.measuring import check_price
    from wgpu_lora.train.measuring import measure as measured
    from wgpu_lora.train.row_statistics import row_statistics

    check_price(price_per_hour)
    check_page(page)
    for shape in project or ():
        shape_config(shape)  # refuses unknown names
    if not measure and (project or price_per_hour is not None):
        raise UserError("--project and --price-per-hour need measured steps: leave --no-measure out.")
    args = with_demo_data(args)
    model = open_model(args.model or "demo", args.device, args.base_dtype)
    found = row_statistics(args, model)
    projection, larger = None, list[dict[str, Any]]()
    if measure:
        with Bar("measuring a few steps", None) as bar:
            bar.advance()
            job = prepare_job(args, model, planning=True)
            projection = measured(job)
            larger = list(projected(projection.rates(), None, job.run.args, model, project or ()))
    written = write_page(page, found, projection, price_per_hour, larger)
    if as_json:
        print_json(_facts(found) | ({"projection": as_facts(projection, price_per_hour)} if projection else {})
                   | ({"larger": larger} if larger else {}))  # fmt: skip
        return 0
    if note:
        line("recipe", note)
    _show(found)
    if projection:
        show_projection(projection, price_per_hour)
        for record in larger:
            cost = "" if price_per_hour is None else f", cost {record['seconds'] / 3600 * price_per_hour:,.4g}"
            fits = {True: "", False: " (it does not fit here)", None: ""}[record["fits"]]
            line("projected", f"{record['shape']}: {record['seconds']:,.0f} s of steps{cost}{fits}")
    line("page", str(written))
    return 0


def _show(found: RowStatistics) -> None:
    line("data", found.summary)
    if found.heldout:
        line("held out", counted(found.heldout, "row"))
    for name, count in found.formats.items():
        line("format", f"{name}: {counted(count, 'row')}")
    line("lengths", ", ".join(f"{name} {length:,}" for name, length in found.quantiles.items()) + " tokens")
    line("trained", f"{share(found.trained / found.total)} of {found.total:,} tokens")
    rows = [_choice(choice) for choice in found.others]
    styles = ["bold" if choice == found.own else None for choice in found.others]
    console().print(table(CHOICES, rows, ["packing"], styles))
    if found.saved is not None:
        line("packing", f"saves {found.saved:.1%} of the positions of batches at {found.own.max_length:,} tokens a row")
    line("this run", ", ".join(f"{name} {value}" for name, value in zip(CHOICES, _choice(found.own), strict=True)))


def _choice(choice: Choice) -> tuple[str, ...]:
    return (
        f"{choice.max_length:,}",
        "yes" if choice.packing else "no",
        f"{choice.cut:,}",
        f"{choice.lost:,}",
        f"{choice.trained:.1%}",
        f"{choice.padding:.1%}",
        f"{choice.steps:,}",
    )


def _facts(found: RowStatistics) -> dict[str, Any]:
    def of(choice: Choice) -> dict[str, Any]:
        return vars(choice) | {"padding": choice.padding}

    return {
        "data": found.name,
        "rows": len(found.lengths),
        "heldout": found.heldout,
        "formats": found.formats,
        "lengths": found.quantiles,
        "tokens": found.total,
        "trained_tokens": found.trained,
        "this_run": of(found.own),
        "saved_by_packing": found.saved,
        "choices": [of(choice) for choice in found.others],
    }
