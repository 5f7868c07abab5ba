"""wgpu-lora data: preparation of training data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.commands import Command, Group
from wgpu_lora.cli.console import Bar, line, print_json
from wgpu_lora.cli.data_show import show
from wgpu_lora.cli.data_stats import stats
from wgpu_lora.cli.options import Json, TrainingCommand, choice, training_options
from wgpu_lora.words import counted

if TYPE_CHECKING:
    from wgpu_lora.data.preparing.run import Progress

DUPLICATES = ("normalized", "exact", "keep")
REASONS = 5  # that are printed
EDITS, COLUMNS = "Edits", "Held-out rows"

data = typer.Typer(
    cls=Group, name="data", help="Prepare training data, and show what is in them.", rich_markup_mode=None
)
data.command("stats", cls=TrainingCommand)(training_options(stats))
data.command("show", cls=TrainingCommand)(training_options(show))


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
    from wgpu_lora.data.preparing import Preparation, prepare_files

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

        def watch(progress: Progress) -> None:
            name = f"preparing {progress.name}: {counted(progress.rows, 'row')}"
            bar.advance(name, progress.bytes / 1e6, progress.total / 1e6 or None)

        report = prepare_files(inputs, output, options, watch)
    if as_json:
        print_json(report)
    else:
        _show(report, output)
    return 0


def _show(report: dict[str, Any], output: Path) -> None:
    rows, repeated = report["rows"], report["duplicates"]
    line("read", f"{counted(rows['in'], 'row')} from {counted(len(report['inputs']), 'input')}")
    for note in report["notes"]:
        line("note", note)
    for what, count in report["edited"].items():
        line("dropped", f"{what} from {counted(count, 'row')}")
    for column, count in report["dropped_columns"].items():
        line("dropped", f"column {column!r} of {counted(count, 'row')}, whose values are not of JSON")
    if rows["duplicates"]:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in repeated.items() if count)
        line("removed", f"{counted(rows['duplicates'], 'duplicate')}: {kinds}")
    reasons = list(report["reasons"].items())
    for reason, count in reasons[:REASONS]:
        line("rejected", f"{count:,}: {reason}")
    if more := sum(count for _, count in reasons[REASONS:]):
        line("rejected", f"{more:,} for other reasons")
    for name, file in report["files"].items():
        line("written", f"{output / name}: {counted(file['rows'], 'row')}")
    line(
        "rows",
        f"{rows['in']:,} in = {rows['out']:,} out + {rows['rejected']:,} rejected + {rows['duplicates']:,} duplicates",
    )
