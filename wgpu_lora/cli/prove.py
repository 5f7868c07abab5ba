"""wgpu-lora prove: evidence from this machine that everything runs on wgpu."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wgpu_lora.cli import parameters
from wgpu_lora.cli.console import console, line
from wgpu_lora.cli.parameters import RECIPE, AllowUnconfined
from wgpu_lora.errors import UserError

if TYPE_CHECKING:
    from wgpu_lora.cli.proof.proof_context import Result

COLOURS = {"passed": "green", "failed": "red", "not run": "bright_black"}


def prove(
    recipe: Annotated[str, typer.Option(help=RECIPE, autocompletion=parameters.RECIPES)] = "wgpu-proof",
    devices: Annotated[
        str | None, typer.Option(help="Devices such as 0,1 (the first trains); default: the first two different ones.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for the results; a number is added if it is in use.")] = Path(
        "proof"
    ),
    only: Annotated[str | None, typer.Option(help="Numbers of the checks to run, such as 1,6.")] = None,
    require_discrete: Annotated[
        int, typer.Option(help="Minimum number of discrete GPUs; with fewer, nothing is proven. [x>=0]")
    ] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 unless everything is proven.")] = False,
    allow_unconfined: AllowUnconfined = False,
) -> int:
    """Prove that training and inference happen on wgpu, without CUDA.

    Nine checks run in child processes; the exit code is 1 if any of them fails. A check that cannot run is 'not run',
    and then nothing is called proven; this changes the exit code only with --strict. The verdict names the devices and
    their kinds; --require-discrete demands real GPUs.
    """
    from wgpu_lora.cli.proof.checks import CHECKS
    from wgpu_lora.cli.proof.proof_run import prove as run

    numbers = set()
    for text in only.split(",") if only else []:
        if not text.strip().isdecimal() or int(text) not in CHECKS:
            raise UserError(f"--only {only} is not valid: give numbers from 1 to {max(CHECKS)}, such as 1,6.")
        numbers.add(int(text))
    result = run(recipe, devices, out, numbers, allow_unconfined, require_discrete, line)
    _table(result)
    line("written", f"{result.directory}/proof.html, proof.json and logs/")
    line("verdict", result.verdict)
    return result.code or int(strict and result.outcome != "proven")


def _table(result: Result) -> None:
    from rich.table import Table
    from rich.text import Text

    from wgpu_lora.cli.proof.proof_context import LEFT_OUT

    table = Table(show_lines=True)
    table.add_column("#", justify="right")
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("finding", overflow="fold")
    for check in result.checks:
        if check.reason == LEFT_OUT:
            continue  # named in the verdict
        status, seconds = Text(check.status, COLOURS[check.status]), f"{check.seconds:.1f}"
        table.add_row(str(check.number), check.name, status, seconds, Text(check.reason))
    console().print(table)
