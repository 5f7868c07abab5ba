"""wgpu-lora demo: the whole way on the embedded model, with answers from before and after side by side."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from wgpu_lora.bounded import printable
from wgpu_lora.cli.console import Bar, console, line
from wgpu_lora.cli.finetune import Watcher, describe, report
from wgpu_lora.cli.options import AllowUnconfined, Device
from wgpu_lora.errors import UserError


def demo(
    output: Annotated[str, typer.Option(help="Directory for the run; one that is in use gets a number.")] = "demo-run",
    max_steps: Annotated[int | None, typer.Option(help="Fewer optimizer steps than the recipe's.")] = None,
    show: Annotated[int, typer.Option(help="Requests whose answers are shown.")] = 3,
    device: Device = None,
    allow_unconfined: AllowUnconfined = False,
) -> int:
    """Fine-tune the demo model and compare its answers.

    It answers held-out requests before and after; unit checks decide which answers are right.
    """
    if max_steps is not None and max_steps < 1:
        raise UserError(f"--max-steps must be greater than 0, not {max_steps}.")
    if show < 0:
        raise UserError(f"--show must be 0 or more, not {show}.")
    from wgpu_lora.demo.compare import Comparison

    changes = {} if max_steps is None else {"max_steps": max_steps}
    comparison = Comparison.prepare(output, device, changes, allow_unconfined)
    job = comparison.job
    line("recipe", str(comparison.recipe))
    line("answers", f"run under {comparison.confinement}")
    describe(job)
    with Bar("held-out requests, before", None) as bar:
        comparison.before = comparison.measure(None, bar.advance)
    line("before", _score(comparison.before))
    with Watcher(job) as watcher:
        facts = job.train(watcher.step, watcher.loaded)
    code = report(facts, job.run.directory)
    if code:
        return code
    with Bar("held-out requests, after", None) as bar:
        comparison.after = comparison.measure(job.run.directory, bar.advance)
    line("after", _score(comparison.after))
    path = comparison.write(facts)
    _side_by_side(comparison.pairs()[:show])
    line("before", _score(comparison.before))
    line("after", _score(comparison.after))
    line("written", f"{path}; ask it yourself: wgpu-lora generate --adapter {job.run.directory} --prompt '...'")
    return 0


def _score(measured: Any) -> str:
    loss = measured.evaluation.loss
    return f"{measured.passed} of {len(measured.answers)} held-out requests pass their checks; held-out loss {loss:.4f}"


def _side_by_side(pairs: list[tuple[str, Any, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    for name in ("request", "before", "after"):
        table.add_column(name, ratio=1, overflow="fold")

    def cell(checked: Any) -> Text:
        mark = "PASS" if checked.passed else f"FAIL: {checked.reason}"
        return Text.assemble((mark, "green" if checked.passed else "red"), "\n", printable(checked.text, "\n\t"))

    for request, before, after in pairs:
        table.add_row(Text(printable(request, "\n\t")), cell(before), cell(after))
    console().print(table)
