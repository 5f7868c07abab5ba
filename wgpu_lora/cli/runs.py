"""wgpu-lora runs: the run log."""

from __future__ import annotations

import sys
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.console import console, is_terminal, line, print_json, table
from wgpu_lora.cli.parameters import choice, refuse_unused
from wgpu_lora.errors import UserError
from wgpu_lora.names.choices import RUN_KINDS, RUN_STATUSES
from wgpu_lora.names.text import count_noun, escape_unprintable

WIDEST, GOAL = 10_000, 12  # columns of the table without a terminal; columns for goals, which are folded
FILTERS = ("status", "kind", "objective", "name", "since", "limit")


def runs(
    ctx: typer.Context,
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID [ID]]", help="A run to show, or two to compare: an id, its beginning or end, or 'last'."
        ),
    ] = None,
    status: Annotated[str | None, choice("Only runs that ended like this, or are running.", RUN_STATUSES)] = None,
    kind: Annotated[str | None, choice("Only runs of this kind.", RUN_KINDS)] = None,
    objective: Annotated[str | None, typer.Option(help="Only runs with this objective, such as sft.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Only runs with this in their name, adapter or goal; may be a pattern with *.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only runs since this date, such as 2026-11-22, or time ago: 12h, 7d.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only this many, the newest. [x>=1]")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List the runs of the run log, show one, or compare two.

    Every finetune, evaluation and benchmark is recorded in runs.jsonl in the user's data directory, unless --no-run-log
    is given or WGPU_LORA_NO_RUN_LOG is set.
    """
    from wgpu_lora.train.options.training_arguments import TrainingArguments
    from wgpu_lora.train.run.run_tracking import with_log
    from wgpu_lora.train.track.run_log import RunLog, facts_of
    from wgpu_lora.train.track.run_log_tables import (
        COLUMNS,
        LEFT,
        Filter,
        card,
        cells,
        compared,
        facts,
        find,
        markdown,
        style,
    )
    from wgpu_lora.train.track.run_log_tables import since as date

    names = ids or []
    if as_markdown and as_json:
        raise UserError("--markdown and --json are both given: leave one of them out.")
    if len(names) > 2:
        raise UserError(f"{len(names)} runs are given: give one to show it, or two to compare them.")
    if names:
        refuse_unused(ctx, FILTERS, "with the id of a run")
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be at least 1, not {limit}.")
    for option, value, choices in (("--status", status, RUN_STATUSES), ("--kind", kind, RUN_KINDS)):
        if value is not None and value not in choices:
            raise UserError(f"{option} must be one of {', '.join(choices)}, not {value!r:.60}.")
    filters = Filter(status, kind, objective, name, date(since) if since else None)
    log = RunLog()
    result = log.read()
    entries = [find(result.entries, run_name) for run_name in names] or [
        entry for entry in result.entries if filters.holds(entry)
    ]
    entries = list(map(with_log, entries if names else entries[-(limit or len(entries)) :]))
    if as_json:
        print_json([facts_of(entry) | {"status": entry.status} for entry in entries])
        return 0
    columns: tuple[str, ...] = COLUMNS
    text_columns: tuple[str, ...] = LEFT
    styles = [style(entry) for entry in entries]
    rows: list[tuple[str, ...]] = [cells(entry) for entry in entries]
    if names:
        defaults = TrainingArguments().as_dict()
        columns = text_columns = ("", *(entry.id for entry in entries))
        found_facts = compared(*entries) if len(names) == 2 else list(facts(entries[0], defaults).items())
        rows, styles = [tuple(row) for row in found_facts], [None] * len(found_facts)
    cell_rows = [[escape_unprintable(cell, "\n") for cell in row] for row in rows]
    if as_markdown:
        print(markdown(columns, cell_rows, text_columns), flush=True)
    elif rows:
        screen = console()
        width = screen.width if names or is_terminal(sys.stdout) else WIDEST
        screen.width = WIDEST
        table_width = screen.measure(table(columns[:-1], [row[:-1] for row in cell_rows])).maximum + GOAL
        screen.width = width
        if table_width > width and not names:
            for row in cell_rows:
                for label, text in zip_longest(row[:1], card(row), fillvalue=""):
                    line(label, text)
        else:
            screen.print(table(columns, cell_rows, text_columns, styles), markup=False)
    if not (as_markdown or rows):
        line("runs", f"none{' of these' if result.entries else ''} in {log.path}")
    if result.damaged and not as_markdown:
        line("note", f"{count_noun(result.damaged, 'line')} of {log.path} cannot be read")
    return 0


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Output directories of finished runs, or of a pipeline, for all of its adapters; or result files of "
            "'bench --protected'.",
            metavar="DIR",
        ),
    ],
    output: Annotated[Path, typer.Option(help="Directory for the page, report.html.")] = Path("report"),
) -> int:
    """Compare finished runs on one page.

    A self-contained HTML file shows the differences between the runs, their losses, learning rate, gradient norm, speed
    and memory and, if there is a profile.json beside a run, the times of its kernels. Prints a Markdown line per run.
    Result files of 'bench --protected' are shown beside published rows.
    """
    from wgpu_lora.cli.report.finished_runs import directories_of, missing_members, read_runs
    from wgpu_lora.cli.report.page import summary, write_report

    if any(path.suffix == ".json" and path.is_file() for path in runs):
        return _overheads(runs, output)
    result = read_runs(runs)
    page = write_report(result, output)
    for run in result:
        print(escape_unprintable(summary(run), "\n"), flush=True)
    missing = missing_members([path for directory in runs for path in directories_of(directory)])
    if missing:
        line("note", f"trained together with these, but not given: {', '.join(map(str, missing))}")
    line("report", str(page))
    return 0


def _overheads(files: list[Path], output: Path) -> int:
    from wgpu_lora.cli.report.overhead_page import write_overheads
    from wgpu_lora.protect.overhead_results import interpretation, read_rows

    for path in files:
        if path.suffix != ".json" or not path.is_file():
            raise UserError(f"{path} is no result file of 'bench --protected': give such files alone, or runs alone.")
    rows = [row for path in files for row in read_rows(path)]
    page = write_overheads(rows, output)
    for text in interpretation(rows):
        line("overhead", text)
    line("report", str(page))
    return 0
