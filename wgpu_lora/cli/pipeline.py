"""wgpu-lora finetune --adapters: several adapters over one base, watched in a table."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wgpu_lora.bounded import printable
from wgpu_lora.cli.console import Bar, console, is_terminal, line
from wgpu_lora.cli.finetune import CURES, FAILED, describe, exit_code, waiting
from wgpu_lora.installed import pip_line
from wgpu_lora.train.arguments import TrainingArguments

if TYPE_CHECKING:
    from wgpu_lora.train.pipeline import PipelineJob
    from wgpu_lora.train.progress import StepResult
    from wgpu_lora.train.tasks import AdapterTask


def tasks_of(pairs: list[str], config: Path | None) -> list[AdapterTask]:
    """The adapters that the command line names, by --adapters and by --adapters-config."""
    from wgpu_lora.train.tasks import read_tasks, task_of_pair

    return [*(task_of_pair(pair) for pair in pairs), *(read_tasks(config) if config else [])]


def train_pipeline(
    args: TrainingArguments, pairs: list[str], config: Path | None, schedule: str, batch_tokens: int | None
) -> int:
    """Trains, shows and reports; returns the exit code."""
    from wgpu_lora.train.curves import CURVES, draw_curves
    from wgpu_lora.train.pipeline import prepare_pipeline

    job = prepare_pipeline(args, tasks_of(pairs, config), schedule, batch_tokens)
    describe(job)
    line("pipeline", f"{len(job.runs)} adapters, {schedule}, batches of up to {job.batch_tokens:,} tokens")
    with Table(job) as table:
        record = job.train(table.step, table.loaded, waiting)
    code = report(record)
    if draw_curves({run.name: run.directory for run in job.runs}, job.output / CURVES):
        line("curves", str(job.output / CURVES))
    else:
        line("curves", f"not drawn: matplotlib is missing; {pip_line('plot')}")
    return code


def report(record: dict[str, Any]) -> int:
    """How each adapter ended, and where it is; returns the exit code."""
    from wgpu_lora.train.trainer import STOP_TEXT

    for adapter in record["adapters"]:
        losses = {"loss": "train", "held-out loss": "held_out", "best held-out loss": "best"}
        known = [
            f"{text} {adapter['losses'][key]:.4f}" for text, key in losses.items() if adapter["losses"][key] is not None
        ]
        why = f"{adapter['name']}: {STOP_TEXT[adapter['stop_reason']]} after {adapter['step']:,} steps"
        line("stopped", "; ".join([why, *known, f"the adapter is in {adapter['checkpoint']}"]))
        if adapter["stop_reason"] in FAILED:
            print(
                f"wgpu-lora: adapter {adapter['name']}: {STOP_TEXT[adapter['stop_reason']]}: {CURES}.", file=sys.stderr
            )
    return max(exit_code(adapter["stop_reason"], record["signal"]) for adapter in record["adapters"])


class Table:
    """A live table on a terminal, a row for each adapter; else a line at every logging step."""

    def __init__(self, job: PipelineJob):
        self._every = job.run.args.logging_steps
        self._loading = Bar("loading", len(job.session.model.checkpoint.names()))
        self._rows: dict[str, StepResult | None] = {run.name: None for run in job.runs}
        self._heldout: dict[str, float] = {}
        self._steps = job.state.step
        self._own = {run.name: job.state.steps.get(run.name, 0) for run in job.runs}
        self._live: Any = None

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loading.close()
        if self._live is not None:
            self._live.stop()

    def loaded(self, name: str) -> None:
        self._loading.advance()

    def step(self, result: StepResult) -> None:
        self._rows[result.adapter] = result
        self._own[result.adapter] = result.step
        if result.eval_loss is not None:
            self._heldout[result.adapter] = result.eval_loss
        with suppress(OSError):  # a log that is full or gone does not end a run
            self._tell(result)

    def _tell(self, result: StepResult) -> None:
        self._loading.close()
        if is_terminal(sys.stderr):
            self._show()
            return
        if result.step % self._every == 0 or result.step == result.total_steps or result.eval_loss is not None:
            text = f"{result.adapter}  {result.step}/{result.total_steps}  epoch {result.epoch:.2f}"
            text += f"  loss {result.loss:.4f}  lr {result.learning_rate:.2e}"
            line("step", text + (f"  held-out {result.eval_loss:.4f}" if result.eval_loss is not None else ""))

    def _show(self) -> None:
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=console(stderr=True), refresh_per_second=4)
            self._live.start()
        self._live.update(self.table())

    def table(self) -> Any:
        """The table as it stands."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=None, pad_edge=False)
        table.add_column("adapter")
        for name in ("step", "epoch", "loss", "held-out", "tokens", "tokens/s", "share of steps"):
            table.add_column(name, justify="right")
        total = max(1, sum(self._own.values()))
        for name, result in self._rows.items():
            share = f"{self._own[name] / total:.0%}"
            if result is None:
                table.add_row(Text(printable(name)), str(self._own[name]), "", "", "", "", "", share)
                continue
            heldout = f"{self._heldout[name]:.4f}" if name in self._heldout else ""
            speed = ""
            with suppress(ZeroDivisionError):
                speed = f"{result.step_tokens / result.seconds:,.0f}"
            table.add_row(
                Text(printable(name)),
                f"{result.step}/{result.total_steps}",
                f"{result.epoch:.2f}",
                f"{result.loss:.4f}",
                heldout,
                f"{result.tokens:,}",
                speed,
                share,
            )
        return table
