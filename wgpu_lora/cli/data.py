"""wgpu-lora data: preparation of training data."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli import parameters
from wgpu_lora.cli.command import Command, Group
from wgpu_lora.cli.console import Bar, console, line, next_commands, print_json, table
from wgpu_lora.cli.parameters import Json, TrainingCommand, choice, training_arguments
from wgpu_lora.cli.plan import PricePerHour, as_facts, show_projection
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun, percent

if TYPE_CHECKING:
    from wgpu_lora.data.curation.curate import CurationProgress
    from wgpu_lora.train.data_statistics import Choice, RowPreview, RowStatistics, Token


CHOICES = ("max length", "packing", "cut", "lost", "tokens kept", "padding", "steps")  # rows cut and lost, an epoch's


def stats(
    ctx: typer.Context,
    page: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("data-stats.html"),
    measure: Annotated[bool, typer.Option(help="Take a few steps, and project the time of the run.")] = True,
    price_per_hour: PricePerHour = None,
    project: Annotated[
        list[str] | None,
        typer.Option(
            help="Project the time to this shape of model, too; may be repeated.",
            metavar="SHAPE",
            autocompletion=parameters.shapes,
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show token lengths, formats and batches of training rows, and the time and cost of training on them.

    The options are those of 'finetune'. Prints tables and writes a page with plots. Lengths are counted after the chat
    template. The time is projected from a few steps on this device, of which nothing is kept.
    """
    from wgpu_lora.bench.larger_models import project as projected
    from wgpu_lora.cli.report.data_page import check_page, write_page
    from wgpu_lora.models.loaded_model import open_model
    from wgpu_lora.models.published_shapes import shape_config
    from wgpu_lora.train.data_statistics import row_statistics
    from wgpu_lora.train.prepare_job import prepare_job, with_demo_data
    from wgpu_lora.train.time_estimate import check_price, project_time

    check_price(price_per_hour)
    check_page(page)
    for shape in project or ():
        shape_config(shape)  # refuses unknown names
    if not measure and (project or price_per_hour is not None):
        raise UserError("--project and --price-per-hour need measured steps: leave --no-measure out.")
    args, note = training_arguments(ctx)
    args = with_demo_data(args)
    model = open_model(args.model or "demo", args.device, args.base_dtype)
    result = row_statistics(args, model)
    projection, larger = None, list[dict[str, Any]]()
    if measure:
        with Bar("measuring a few steps", None) as bar:
            bar.advance()
            job = prepare_job(args, model, planning=True)
            projection = project_time(job)
            larger = list(projected(projection.rates(), None, job.run.args, model, project or ()))
    page_path = write_page(page, result, projection, price_per_hour, larger)
    if as_json:
        print_json(_facts(result) | ({"projection": as_facts(projection, price_per_hour)} if projection else {})
                   | ({"larger": larger} if larger else {}))  # fmt: skip
        return 0
    if note:
        line("recipe", note)
    _print_statistics(result)
    if projection:
        show_projection(projection, price_per_hour)
        for record in larger:
            cost = "" if price_per_hour is None else f", cost {record['seconds'] / 3600 * price_per_hour:,.4g}"
            fits = {True: "", False: " (it does not fit here)", None: ""}[record["fits"]]
            line("projected", f"{record['shape']}: {record['seconds']:,.0f} s of steps{cost}{fits}")
    line("page", str(page_path))
    return 0


def _print_statistics(statistics: RowStatistics) -> None:
    line("data", statistics.summary)
    if statistics.heldout:
        line("held out", count_noun(statistics.heldout, "row"))
    for name, count in statistics.formats.items():
        line("format", f"{name}: {count_noun(count, 'row')}")
    line("lengths", ", ".join(f"{name} {length:,}" for name, length in statistics.quantiles.items()) + " tokens")
    line("trained", f"{percent(statistics.trained / statistics.total)} of {statistics.total:,} tokens")
    rows = [_choice(choice) for choice in statistics.others]
    styles = ["bold" if choice == statistics.own else None for choice in statistics.others]
    console().print(table(CHOICES, rows, ["packing"], styles))
    if statistics.packing_savings is not None:
        line(
            "packing",
            f"saves {statistics.packing_savings:.1%} of the positions of batches at {statistics.own.max_length:,} "
            "tokens a row",
        )
    line("this run", ", ".join(f"{name} {value}" for name, value in zip(CHOICES, _choice(statistics.own), strict=True)))


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


def _facts(statistics: RowStatistics) -> dict[str, Any]:
    def of(choice: Choice) -> dict[str, Any]:
        return vars(choice) | {"padding": choice.padding}

    return {
        "data": statistics.name,
        "rows": len(statistics.lengths),
        "heldout": statistics.heldout,
        "formats": statistics.formats,
        "lengths": statistics.quantiles,
        "tokens": statistics.total,
        "trained_tokens": statistics.trained,
        "this_run": of(statistics.own),
        "saved_by_packing": statistics.packing_savings,
        "choices": [of(choice) for choice in statistics.others],
    }


PARTS = {1: ("row",), 2: ("chosen", "rejected")}  # names of a sample's sequences, by how many it has


def show(
    ctx: typer.Context,
    row: Annotated[
        list[int] | None,
        typer.Option(help="Number of a row, from 1; may be repeated. By default the first three. [x>=1]"),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="List every token on a line of its own.")] = False,
    as_json: Json = False,
) -> int:
    """Show rows as the model gets them: their text, its token ids, and which of them are trained on.

    The options are those of 'finetune'. What the chat template leaves out of a row is named. No device is used.
    """
    from wgpu_lora.formats.hub import resolve_model
    from wgpu_lora.models.model_files import read_model
    from wgpu_lora.train.data_statistics import preview_rows
    from wgpu_lora.train.objectives import objective_of
    from wgpu_lora.train.prepare_job import with_demo_data
    from wgpu_lora.train.training_data import sources_of

    if any(number < 1 for number in row or ()):
        raise UserError("--row counts from 1: give a larger number.")
    args, note = training_arguments(ctx)
    args = with_demo_data(args)
    model = args.model or "demo"
    source, numbers = sources_of(args)[0], set(row or ())
    result = list(preview_rows(args, read_model(resolve_model(model)), source, numbers))
    if len(result) < len(numbers):
        raise UserError(f"{source.display_name} has fewer than {max(numbers):,} rows: give a smaller number for --row.")
    if as_json:
        print_json([_as_json(preview) for preview in result])
        return 0
    if note:
        line("recipe", note)
    line("model", f"the tokenizer and the chat template of {model}")
    for preview in result:
        _print_preview(preview, PARTS[objective_of(args).rows_per_sample], tokens)
    return 0


def _print_preview(preview: RowPreview, parts: tuple[str, ...], listed: bool) -> None:
    from wgpu_lora.train.data_statistics import segments

    print(f"{preview.position}", flush=True)
    for number, tokens in enumerate(preview.rows):
        trained = sum(token.trained for token in tokens)
        line(parts[number % len(parts)], f"{count_noun(len(tokens), 'token')}, {trained:,} trained on")
        for is_trained, run in segments(tokens):
            mark = "trained" if is_trained else "context"
            if listed:
                for token in run:
                    line(mark, f"{token.id:>7} {token.text!r}")
            else:
                line(mark, _text(run), whole=True)
                line("", " ".join(str(token.id) for token in run))
    for text in preview.notes:
        line("note", text)
    if preview.refusal:
        line("refused", preview.refusal)


def _text(run: list[Token]) -> str:
    return repr("".join(token.text for token in run))


def _as_json(preview: RowPreview) -> dict[str, Any]:
    from wgpu_lora.train.data_statistics import segments

    rows = [
        {
            "tokens": [asdict(token) for token in tokens],
            "segments": [
                {"trained": trained, "text": "".join(token.text for token in run)} for trained, run in segments(tokens)
            ],
        }
        for tokens in preview.rows
    ]
    return {
        preview.position.unit: preview.position.number,
        "rows": rows,
        "notes": preview.notes,
        "refused": preview.refusal,
    }


DUPLICATES = ("normalized", "exact", "keep")
REASONS = 5  # that are printed
EDITS, COLUMNS = "Edits", "Held-out rows"

data = typer.Typer(
    cls=Group, name="data", help="Prepare training data, and show what is in them.", rich_markup_mode=None
)
data.command("stats", cls=TrainingCommand)(stats)
data.command("show", cls=TrainingCommand)(show)


@data.command("prepare", cls=Command)
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="IN", help="Files of rows, folders, patterns such as 'data/**/*.jsonl', or datasets of the hub."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Directory to write.", show_default=False)],
    exclude: Annotated[
        list[str] | None, typer.Option(help="Leave out files whose path or name matches; may be repeated.")
    ] = None,
    preferences_from: Annotated[
        list[str] | None,
        typer.Option(
            help="Take pairs and labelled answers only from files whose path or name matches; may be repeated.",
            metavar="GLOB",
        ),
    ] = None,
    duplicates: Annotated[
        str,
        choice(
            "Duplicates to remove: equal ones after normalising case, white space and Unicode, exactly equal ones, or "
            "none.",
            DUPLICATES,
        ),
    ] = DUPLICATES[0],
    near_duplicates: Annotated[
        float | None,
        typer.Option(help="Also remove rows that are at least this similar to an earlier one, such as 0.8."),
    ] = None,
    strip_system: Annotated[
        bool, typer.Option("--strip-system", help="Drop all system messages.", rich_help_panel=EDITS)
    ] = False,
    drop_thinking: Annotated[
        bool, typer.Option("--drop-thinking", help="Drop reasoning from answers.", rich_help_panel=EDITS)
    ] = False,
    enable_thinking: Annotated[
        bool | None,
        typer.Option(
            help="The chat template's setting; if off, answers with markers of reasoning are rejected.",
            rich_help_panel=EDITS,
        ),
    ] = None,
    max_characters: Annotated[int | None, typer.Option(help="Reject longer rows.", rich_help_panel=EDITS)] = None,
    validation_split: Annotated[
        float | None,
        typer.Option(help="Share (0.1) or number (50) of rows to hold out, into valid.jsonl.", rich_help_panel=COLUMNS),
    ] = None,
    group_by: Annotated[
        str | None,
        typer.Option(help="Column; rows with the same value are held out together.", rich_help_panel=COLUMNS),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split.", rich_help_panel=COLUMNS)] = 42,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the result of an earlier preparation.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Make training data from files in any format.

    Writes train.jsonl and, with --validation-split, valid.jsonl; preferences.jsonl (pairs of answers) and
    labelled.jsonl (answers with a label), if there are such rows; rejected.jsonl, with the place and the reason of
    every row that cannot be used; and report.json. Every row is written, rejected or counted as a duplicate.
    """
    from wgpu_lora.data.curation import Preparation, prepare_files

    options = Preparation(
        exclude=exclude or (),
        preferences_from=preferences_from or (),
        duplicates=duplicates,
        near_duplicates=near_duplicates,
        strip_system=strip_system,
        drop_thinking=drop_thinking,
        enable_thinking=enable_thinking,
        max_characters=max_characters,
        validation_split=validation_split,
        group_by=group_by,
        seed=seed,
        overwrite=overwrite,
    )
    with Bar("preparing", None, " MB") as bar:

        def watch(progress: CurationProgress) -> None:
            name = f"preparing {progress.name}: {count_noun(progress.rows, 'row')}"
            bar.advance(name, progress.bytes / 1e6, progress.total / 1e6 or None)

        report = prepare_files(inputs, output, options, watch)
    if as_json:
        print_json(report)
    else:
        _print_prepared(report, output)
    return 0


def _print_prepared(report: dict[str, Any], output: Path) -> None:
    rows, repeated = report["rows"], report["duplicates"]
    line("read", f"{count_noun(rows['in'], 'row')} from {count_noun(len(report['inputs']), 'input')}")
    for note in report["notes"]:
        line("note", note)
    for part, count in report["edited"].items():
        line("dropped", f"{part} from {count_noun(count, 'row')}")
    for column, count in report["dropped_columns"].items():
        line("dropped", f"column {column!r} of {count_noun(count, 'row')}, whose values are not of JSON")
    if rows["duplicates"]:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in repeated.items() if count)
        line("removed", f"{count_noun(rows['duplicates'], 'duplicate')}: {kinds}")
    reasons = list(report["reasons"].items())
    for reason, count in reasons[:REASONS]:
        line("rejected", f"{count:,}: {reason}")
    if other_count := sum(count for _, count in reasons[REASONS:]):
        line("rejected", f"{other_count:,} for other reasons")
    for name, file in report["files"].items():
        line("written", f"{output / name}: {count_noun(file['rows'], 'row')}")
    line(
        "rows",
        f"{rows['in']:,} in = {rows['out']:,} out + {rows['rejected']:,} rejected + {rows['duplicates']:,} duplicates",
    )
    next_commands(
        output, ["{program} data show --data {place}", "{program} finetune --data {place} --output my-adapter"]
    )
