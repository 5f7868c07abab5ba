"""wgpu-lora finetune: train an adapter on data."""

from __future__ import annotations

import shlex
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wgpu_lora.cli.console import OFTEN, Bar, duration, is_terminal, line
from wgpu_lora.cli.describing import describe
from wgpu_lora.cli.ending import CURES, losses
from wgpu_lora.cli.options import choice
from wgpu_lora.cli.starting import Starting
from wgpu_lora.cli.trend import Trend, hardware
from wgpu_lora.events import Evaluating, StepResult
from wgpu_lora.installed import program
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.train.options.general import ADAPTER, FILES
from wgpu_lora.train.policy import POLICIES
from wgpu_lora.words import counted

if TYPE_CHECKING:
    from wgpu_lora.train.finetune import FinetuneJob
    from wgpu_lora.train.records import RunRecord

SMOOTHED = 10  # steps that the shown speed is averaged over
# Options of a pipeline, which `plan` has too.
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        help="DATA:CHECKPOINT of an adapter; if given several times, all are trained over one base model.",
        metavar="DATA:CHECKPOINT",
        rich_help_panel=FILES,
    ),
]
AdaptersConfig = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with an [[adapter]] table per adapter, which may have its own options.", rich_help_panel=FILES
    ),
]
Schedule = Annotated[
    str,
    choice("Which adapters take each step.", POLICIES, rich_help_panel=ADAPTER),
]
BatchTokens = Annotated[
    int | None,
    typer.Option(help="Maximum tokens of a batch that several adapters share. [x>0]", rich_help_panel=ADAPTER),
]


Protected = Annotated[
    Path | None,
    typer.Option(
        help="JOB.toml of a run on sealed data: what it trains on and to whom its results are sealed.",
        metavar="JOB.toml",
        rich_help_panel=FILES,
    ),
]
Nonce = Annotated[
    str | None,
    typer.Option(
        help="The data owner's nonce, for a protected job whose releases come as files.", rich_help_panel=FILES
    ),
]


def finetune(
    args: TrainingArguments,
    note: str | None,
    adapters: Adapters = None,
    adapters_config: AdaptersConfig = None,
    schedule: Schedule = "synchronized",
    batch_tokens: BatchTokens = None,
    protected: Protected = None,
    nonce: Nonce = None,
) -> int:
    """Train a LoRA adapter on your data, or several over one base model.

    Without --model and --data, the demo model is trained on the demo's data.
    """
    if note:
        line("recipe", note)
    if adapters or adapters_config:
        from wgpu_lora.cli.pipeline import train_pipeline

        return train_pipeline(args, adapters or [], adapters_config, schedule, batch_tokens)
    if args.resume:
        from wgpu_lora.train.pipeline_state import home_of

        home = home_of(args.directory)
        if home:
            from wgpu_lora.cli.pipeline import resume_pipeline

            return resume_pipeline(args, home)
    from wgpu_lora.train.finetune import prepare_job

    job = prepare_job(args)
    describe(job)
    with Watcher(job) as watcher:
        record = job.train(watcher)
    return report(record)


class Watcher(Starting):
    """Shows tuning, loading and training: bars on a terminal, else lines.

    Lines are printed for the first step and for logged ones, and at least every ten seconds.
    """

    def __init__(self, job: FinetuneJob):
        super().__init__(job)
        self._run = job.run
        self._session = job.session
        self._training = Bar("training", None)
        self._quiet = not is_terminal(sys.stderr)
        self._first = True
        self._said = 0.0
        self._heldout = ""
        self._trend, self._hardware = Trend(sys.stderr), ""
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=SMOOTHED)  # (trained, processed, seconds) per step

    def __enter__(self) -> Watcher:
        if not self._left:
            self.ready()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        super().close()
        self._training.close()

    def ready(self) -> None:
        self.close()
        compiling = "compiling the kernels of the first step"
        if self._quiet:
            self._bar = Bar(compiling, None)
            self._bar.advance()
        else:
            total = None if self._run.args.target_seconds else self._run.stream.total_steps()
            self._training.advance(None, self._run.state.step, total, compiling)

    def evaluating(self, evaluating: Evaluating) -> None:
        if self._quiet or not evaluating.step:
            super().evaluating(evaluating)
        elif evaluating.loss is None:
            of = counted(evaluating.total, "row")
            detail = f"measuring the held-out loss: {evaluating.rows:,} of {of}"
            self._training.advance(None, evaluating.step, detail=detail)

    def logged(self, line: Mapping[str, float], adapter: str | None) -> None:
        self._hardware = hardware(line) or self._hardware

    def step(self, result: StepResult) -> None:
        self._trend.add(result.loss)
        text = result.facts()
        if not self._first:  # the first step includes compilation
            self._recent.append((result.step_tokens, result.step_processed_tokens, result.seconds))
            trained, processed, seconds = (sum(values) for values in zip(*self._recent, strict=True))
            text += "  " + speed(trained, processed, seconds)
        if result.eval_loss is not None:
            self._heldout = f"  held-out {result.eval_loss:.4f}"
        with suppress(OSError):  # an unwritable stdout does not end a run
            self._show(result, text)
        self._first = False

    def _show(self, result: StepResult, text: str) -> None:
        super().close()
        if not self._quiet:
            detail = f"{text}{self._heldout}\n{self._below()}"
            self._training.advance(None, result.step, result.total_steps or None, detail)
            return
        evaluated, now = result.eval_loss is not None, time.monotonic()
        if self._first or self._run.logs(result.step, evaluated) or now - self._said >= OFTEN:
            self._said = now
            more = self._remaining(result) + (self._heldout if evaluated else "")
            line("step", f"{result.step}/{result.total_steps}  epoch {result.epoch:.2f}  {text}{more}")

    def _below(self) -> str:
        """The second line on a terminal: the trend of the loss, memory, and the hardware."""
        from wgpu_lora.train.memory import readable

        allocated = readable(self._session.device.allocated)
        return "  ".join(filter(None, [self._trend.bars(), f"{allocated} on the device", self._hardware]))

    def _remaining(self, result: StepResult) -> str:
        """The estimated time of the remaining steps, from the last ones."""
        if not self._recent or result.step >= result.total_steps:
            return ""
        each = sum(seconds for _, _, seconds in self._recent) / len(self._recent)
        return f"  {duration(each * (result.total_steps - result.step))} left"


def speed(trained: int, processed: int, seconds: float) -> str:
    """Both rates, since other programs count either."""
    seconds = max(seconds, 1e-9)
    return f"{trained / seconds:,.0f} trained, {processed / seconds:,.0f} processed tokens/s"


def report(record: RunRecord, command: str | None = None, adapter: str | None = None) -> int:
    """Print how the run ended and where its adapter is; returns the exit code.

    command: that continues an interrupted run; '' prints none. adapter: where it is, if not in the run's directory.
    """
    from wgpu_lora.train.ending import STOP_TEXT, exit_code

    state, reason, outcome, output = record.state, record.stop_reason, record.outcome, record.directory
    timed = reason == "target seconds"  # its number of steps is only known at the end
    count = counted(state.step, "step") if timed else f"{state.step:,} of {counted(state.total_steps, 'step')}"
    seconds = state.elapsed_seconds if record.options.target_seconds else state.seconds
    why = f"{count} in {seconds:,.1f} s ({STOP_TEXT[reason]})"
    known = losses(state.last_loss, state.first_eval_loss, state.last_eval_loss)
    scales = record.options.train == "quant-scales"
    where = f"the models are in {output}/last-f16 and others" if scales else f"the adapter is in {adapter or output}"
    line(outcome, "; ".join([why, *known, where]))
    if state.best_step and state.best_step < state.step:
        best = f"held-out loss {state.best_eval_loss:.4f} after step {state.best_step:,}"
        place, what = ("best-f16", "model") if scales else ("best", "adapter")
        line("best", f"{f'{output / place}.tar.age' if adapter else output / place} has the best {what}: {best}")
    if outcome == "interrupted" and command != "":
        again = command or f"{program()} finetune --output {shlex.quote(str(output))} --resume"
        line("continue", again, whole=True)
    if outcome == "failed":
        print(f"wgpu-lora: {STOP_TEXT[reason]}: {CURES}.", file=sys.stderr)
    if record.damaged_log_lines:
        line("log", f"dropped {counted(record.damaged_log_lines, 'damaged line')} of log.jsonl")
    return exit_code(reason, record.signal)
