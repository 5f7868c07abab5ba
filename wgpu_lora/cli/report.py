"""wgpu-lora report: finished runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.bounded import printable
from wgpu_lora.cli.console import line
from wgpu_lora.errors import UserError


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
    from wgpu_lora.bench.overhead_results import is_result_file
    from wgpu_lora.report.facts import summary
    from wgpu_lora.report.members import directories_of, left_out
    from wgpu_lora.report.page import write_report
    from wgpu_lora.report.runs import read_runs

    if any(is_result_file(path) for path in runs):
        return _overheads(runs, output)
    found = read_runs(runs)
    page = write_report(found, output)
    for run in found:
        print(printable(summary(run), "\n"), flush=True)
    others = left_out([place for directory in runs for place in directories_of(directory)])
    if others:
        line("note", f"trained together with these, but not given: {', '.join(map(str, others))}")
    line("report", str(page))
    return 0


def _overheads(files: list[Path], output: Path) -> int:
    from wgpu_lora.bench.overhead_results import interpretation, is_result_file, read_results
    from wgpu_lora.report.overhead_page import write_overheads

    for path in files:
        if not is_result_file(path):
            raise UserError(f"{path} is no result file of 'bench --protected': give such files alone, or runs alone.")
    found = [read_results(path) for path in files]
    page = write_overheads(found, output)
    for text in interpretation([row for results in found for row in results.rows]):
        line("overhead", text)
    line("report", str(page))
    return 0
