"""wgpu-lora finetune --adapters: several adapters over one base model, shown in a table."""

from __future__ import annotations

import shlex
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wgpu_lora.bounded import printable
from wgpu_lora.cli.console import OFTEN, console, duration, is_terminal, line
from wgpu_lora.cli.describing import describe
from wgpu_lora.cli.ending import CURES, losses
from wgpu_lora.cli.starting import Starting
from wgpu_lora.cli.trend import Trend, hardware
from wgpu_lora.events import Evaluating, StepResult
from wgpu_lora.installed import pip_line, program
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.words import counted

if TYPE_CHECKING:
    from wgpu_lora.train.pipeline import PipelineJob
    from wgpu_lora.train.records import PipelineRecord
    from wgpu_lora.train.tasks import AdapterTask


RECENT, TREND = 10, 10  # steps that times are averaged over, and bars of a loss


def train_pipeline(
    args: TrainingArguments, pairs: list[str], config: Path | None, schedule: str, batch_tokens: int | None
) -> int:
    """Train, show progress and report; returns the exit code."""
    from wgpu_lora.train.tasks import named_tasks

    return _train(args, named_tasks(pairs, config), schedule, batch_tokens)


def resume_pipeline(args: TrainingArguments, home: Path) -> int:
    """Resume the pipeline whose record is in a directory."""
    from wgpu_lora.train.pipeline_state import read_pipeline_state
    from wgpu_lora.train.tasks import tasks_of_request

    request = read_pipeline_state(home).request
    return _train(args, tasks_of_request(request, home), request["schedule"], request["batch_tokens"])


def _train(args: TrainingArguments, tasks: list[AdapterTask], schedule: str, batch_tokens: int | None) -> int:
    from wgpu_lora.train.curves import CURVES, draw_curves
    from wgpu_lora.train.pipeline import prepare_pipeline

    job = prepare_pipeline(args, tasks, schedule, batch_tokens)
    describe(job)
    line("pipeline", f"{counted(len(job.runs), 'adapter')}, {schedule}, batches of up to {job.batch_tokens:,} tokens")
    with Table(job) as table:
        record = job.train(table)
    code = report(record, job.home)
    if draw_curves({run.adapter_name: run.directory for run in job.runs}, job.home / CURVES):
        line("curves", str(job.home / CURVES))
    else:
        line("curves", f"not plotted: matplotlib is missing; {pip_line('plot')}")
    return code


def report(record: PipelineRecord, home: Path) -> int:
    """Print how each adapter ended and where it is; returns the exit code."""
    from wgpu_lora.train.ending import STOP_TEXT, exit_code

    outcomes = []
    for adapter in record.adapters:
        outcome, text = adapter.outcome, STOP_TEXT[adapter.stop_reason]
        outcomes.append(outcome)
        why = f"{adapter.name}: {adapter.step:,} of {counted(adapter.total_steps, 'step')} ({text})"
        found = adapter.losses
        known = losses(found.train, found.before, found.held_out)
        line(outcome, "; ".join([why, *known, f"the adapter is in {adapter.checkpoint}"]))
        if outcome == "failed":
            print(f"wgpu-lora: adapter {adapter.name}: {text}: {CURES}.", file=sys.stderr)
    if "interrupted" in outcomes:
        line("continue", f"{program()} finetune --output {shlex.quote(str(home))} --resume", whole=True)
    return max(exit_code(adapter.stop_reason, record.signal) for adapter in record.adapters)


class Table(Starting):
    """A live table on a terminal, with a row per adapter; else lines as for a single run."""

    def __init__(self, job: PipelineJob):
        super().__init__(job)
        self._runs = {run.adapter_name: run for run in job.runs}
        self._said: dict[str, float] = {}
        self._rows: dict[str, StepResult | None] = {run.adapter_name: None for run in job.runs}
        self._heldout: dict[str, float] = {}
        self._steps = job.state.step
        self._own = {run.adapter_name: job.state.steps.get(run.adapter_name, 0) for run in job.runs}
        self._trends = {run.adapter_name: Trend(sys.stderr) for run in job.runs}
        self._seconds: dict[str, deque[float]] = {run.adapter_name: deque(maxlen=RECENT) for run in job.runs}
        self._device, self._hardware = job.session.device, ""
        self._live: Any = None

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        if self._live is not None:
            self._live.stop()

    def evaluating(self, evaluating: Evaluating) -> None:
        if self._live is None:
            super().evaluating(evaluating)

    def logged(self, line: Mapping[str, float], adapter: str | None) -> None:
        self._hardware = hardware(line) or self._hardware

    def step(self, result: StepResult) -> None:
        assert result.adapter, "a pipeline's adapters have names"
        self._rows[result.adapter] = result
        self._own[result.adapter] = result.step
        self._trends[result.adapter].add(result.loss)
        self._seconds[result.adapter].append(result.seconds)
        if result.eval_loss is not None:
            self._heldout[result.adapter] = result.eval_loss
        with suppress(OSError):  # an unwritable stdout does not end a run
            self._tell(result.adapter, result)

    def _tell(self, name: str, result: StepResult) -> None:
        self.close()
        if is_terminal(sys.stderr):
            self._show()
            return
        now, evaluated = time.monotonic(), result.eval_loss is not None
        due = now - self._said.get(name, -OFTEN) >= OFTEN  # always for the first step
        if due or self._runs[name].logs(result.step, evaluated):
            self._said[name] = now
            text = f"{name}  {result.step}/{result.total_steps}  epoch {result.epoch:.2f}"
            text += f"  {result.facts()}"
            line("step", text + (f"  held-out {result.eval_loss:.4f}" if result.eval_loss is not None else ""))

    def _show(self) -> None:
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=console(stderr=True), refresh_per_second=4)
            self._live.start()
        self._live.update(self.table())

    def table(self) -> Any:
        """The current table."""
        from rich.table import Table as RichTable
        from rich.text import Text

        from wgpu_lora.train.memory import readable

        table = RichTable(box=None, pad_edge=False)
        table.add_column("adapter")
        for name in (
            "step",
            "epoch",
            "loss",
            "held-out",
            "trained",
            "trained/s",
            "processed/s",
            "share of steps",
            "trend",
        ):
            table.add_column(name, justify="right")
        total = max(1, sum(self._own.values()))
        for name, result in self._rows.items():
            share = f"{self._own[name] / total:.0%}"
            if result is None:
                table.add_row(Text(printable(name)), str(self._own[name]), *[""] * 6, share, "")
                continue
            heldout = f"{self._heldout[name]:.4f}" if name in self._heldout else ""
            seconds = max(result.seconds, 1e-9)
            table.add_row(
                Text(printable(name)),
                f"{result.step}/{result.total_steps}",
                f"{result.epoch:.2f}",
                f"{result.loss:.4f}",
                heldout,
                f"{result.tokens:,}",
                f"{result.step_tokens / seconds:,.0f}",
                f"{result.step_processed_tokens / seconds:,.0f}",
                share,
                self._trends[name].bars(TREND),
            )
        below = [self._remaining(), f"{readable(self._device.allocated)} on the device", self._hardware]
        table.caption, table.caption_justify = ", ".join(filter(None, below)), "left"
        return table

    def _remaining(self) -> str:
        """The estimated time of the remaining steps of all adapters, from the last ones."""
        taken = [(result, self._seconds[name]) for name, result in self._rows.items() if result]
        left = sum((one.total_steps - one.step) * sum(recent) / len(recent) for one, recent in taken)
        return f"{duration(left)} left" if left > 0 and len(taken) == len(self._rows) else ""
