"""wgpu-lora report: finished runs on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.bounded import printable
from wgpu_lora.cli.console import line


def report(
    runs: Annotated[list[Path], typer.Argument(help="Output directories of finished runs.", metavar="DIR...")],
    output: Annotated[Path, typer.Option(help="Directory for the page and its pictures.")] = Path("report"),
) -> int:
    """Draw finished runs, laid over each other.

    Losses, learning rate, gradient norm, speed, memory and, where profile.json lies beside a run, the kernels' times,
    on one self-contained page and in PNG files. Prints a Markdown line for each run.
    """
    from wgpu_lora.report.page import write_report
    from wgpu_lora.report.runs import read_runs

    found = read_runs(runs)
    page = write_report(found, output)
    for run in found:
        print(printable(run.summary, "\n"), flush=True)
    line("report", str(page))
    return 0
