"""wgpu-lora finetune: train an adapter on data."""

from __future__ import annotations

import shlex
import sys
import time
import traceback
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.console import FEWEST, OF_ADAPTERS, OFTEN, Bar, console, is_terminal, line, next_commands
from wgpu_lora.cli.parameters import choice, given_options, refuse_unused, training_arguments
from wgpu_lora.cli.run_summary import CURES, describe, describe_answers, describe_best, describe_end
from wgpu_lora.cli.training_progress import StartupProgress, Trend, hardware
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, StepResult
from wgpu_lora.files.installation import pip_line, program
from wgpu_lora.names.text import count_noun, duration, escape_unprintable
from wgpu_lora.train.loop.slot_policy import POLICIES
from wgpu_lora.train.options.option_fields import ADAPTER, FILES
from wgpu_lora.train.options.training_arguments import TrainingArguments

if TYPE_CHECKING:
    from wgpu_lora.events import Events
    from wgpu_lora.train.job import Job
    from wgpu_lora.train.run.adapter_run import AdapterRun
    from wgpu_lora.train.run.records import RunRecord


SMOOTHED, TREND = 10, 10  # steps that the shown speed is averaged over, and bars of a loss in a table
COLUMNS = ("step", "epoch", "loss", "held-out", "trained", "trained/s", "processed/s", "share of steps", "trend")
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
ANSWERS = 16
Answers = Annotated[
    int,
    typer.Option(
        help="Held-out rows that are answered at the end, beside their own answers. [x>=0]", rich_help_panel=FILES
    ),
]


def finetune(
    ctx: typer.Context,
    adapters: Adapters = None,
    adapters_config: AdaptersConfig = None,
    schedule: Schedule = "synchronized",
    batch_tokens: BatchTokens = None,
    protected: Protected = None,
    nonce: Nonce = None,
    answers: Answers = ANSWERS,
) -> int:
    """Train a LoRA adapter on your data, or several over one base model.

    Without --model and --data, the demo model is trained on the demo's data.
    """
    if protected:
        return run_protected(ctx, protected, nonce)
    refuse_unused(ctx, ("nonce",), "without --protected")
    args, note = training_arguments(ctx)
    if answers < 0:
        raise UserError(f"--answers must be 0 or more, not {answers}.")
    if note:
        line("recipe", note)
    job = job_of(args, adapters, adapters_config, schedule, batch_tokens)
    describe(job)
    shared = job.shared
    if shared:
        count = count_noun(len(job.runs), "adapter")
        line("pipeline", f"{count}, {shared.schedule}, batches of up to {shared.batch_tokens:,} tokens")
    with TrainingProgress(job) as watcher:
        job.train(watcher)
    before = [text for run in job.runs for text in run.start_warnings]
    records = {run.name: job.records[run.slot] for run in job.runs}
    code = report(records, before=before, home=job.home)
    if shared:
        if draw_curves({run.adapter_name: run.directory for run in job.runs}, shared.home / CURVES):
            line("curves", str(shared.home / CURVES))
        else:
            line("curves", f"not plotted: matplotlib is missing; {pip_line('plot')}")
    if all(record.outcome in ("finished", "stopped early") for record in records.values()):
        if shared:
            modules = " ".join(shlex.quote(f"{run.name}={run.directory}") for run in job.runs)
            line("next", f"{program()} serve --lora-modules {modules}", whole=True)
        else:
            describe_answers(job, records[None], answers)
            next_commands(job.run.directory, OF_ADAPTERS)
    return code


def job_of(
    args: TrainingArguments,
    pairs: list[str] | None,
    config: Path | None,
    schedule: str,
    batch_tokens: int | None,
    planning: bool = False,
    shape: str | None = None,
) -> Job[Any]:
    """The job of the options: one adapter, several, those of the directory that is resumed, or of a planned shape."""
    from wgpu_lora.train.prepare_job import prepare_job, prepare_multi_adapter_job, prepare_shape_job

    if shape:
        if pairs or config:
            raise UserError("--shape plans one adapter: leave out --adapters and --adapters-config.")
        return prepare_shape_job(shape, args)
    if pairs or config:
        from wgpu_lora.train.adapter_tasks import named_tasks

        tasks = named_tasks(pairs or [], config)
        return prepare_multi_adapter_job(args, tasks, schedule, batch_tokens, planning=planning)
    if args.resume and not planning:
        from wgpu_lora.train.run.multi_adapter_state import home_of, read_multi_adapter_state

        if home := home_of(args.directory):
            from wgpu_lora.train.adapter_tasks import tasks_of_request

            request = read_multi_adapter_state(home).request
            tasks = tasks_of_request(request, home)
            return prepare_multi_adapter_job(args, tasks, request["schedule"], request["batch_tokens"])
    return prepare_job(args, planning=planning)


@dataclass
class Row:
    """What is shown of a run in training. recent: (trained, processed, seconds) of its last steps."""

    run: AdapterRun
    trend: Trend = field(default_factory=lambda: Trend(sys.stderr))
    recent: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=SMOOTHED))
    result: StepResult | None = None
    heldout: str = ""
    last_line: float = -OFTEN

    def add(self, result: StepResult) -> None:
        """Take a step in; the first one includes compilation."""
        if self.result:
            self.recent.append((result.step_tokens, result.step_processed_tokens, result.seconds))
        self.result = result
        self.trend.add(result.progress)
        if result.eval_loss is not None:
            self.heldout = f"{result.eval_loss:.4f}"

    @property
    def sums(self) -> tuple[int, int, float]:
        """Trained tokens, processed tokens and seconds of the last steps."""
        trained, processed, seconds = (sum(values) for values in zip(*self.recent, strict=True))
        return trained, processed, seconds

    def seconds_left(self) -> float | None:
        """The estimated time of the remaining steps, from the last ones; None before there are enough."""
        if self.result is None or len(self.recent) < FEWEST:
            return None
        times = training_steps([(trained, seconds) for trained, _, seconds in self.recent])
        return fmean(times) * max(0, self.result.total_steps - self.result.step)


class TrainingProgress(StartupProgress):
    """Shows tuning, loading and training: on a terminal a bar, or a table with a row per adapter; else lines.

    Lines are printed for the first step and for logged ones, and at least every ten seconds.
    """

    def __init__(self, job: Job[Any]):
        super().__init__(job)
        self._rows: dict[str | None, Row] = {run.name: Row(run) for run in job.runs}
        self._session = job.session
        self._training = Bar("training", None)
        self._live: Any = None
        self._quiet = not is_terminal(sys.stderr)
        self._hardware = ""

    def __enter__(self) -> TrainingProgress:
        if not self._tensors_to_load:
            self.ready()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        if self._live is not None:
            self._live.stop()

    @property
    def _run(self) -> AdapterRun | None:
        """A single run, which has a bar; None of several, which have a table."""
        row = self._rows.get(None)
        return row.run if row else None

    def close(self) -> None:
        super().close()
        self._training.close()

    def ready(self) -> None:
        self.close()
        compiling = "compiling the kernels of the first step"
        if self._quiet:
            self._bar = Bar(compiling, None)
            self._bar.advance()
        elif run := self._run:
            total = None if run.args.target_seconds else run.stream.total_steps()
            self._training.advance(None, run.state.step, total, compiling)

    def evaluating(self, evaluating: Evaluating) -> None:
        if self._quiet or not evaluating.step:
            super().evaluating(evaluating)
        elif self._run and evaluating.loss is None:
            of = count_noun(evaluating.total, "row")
            detail = f"measuring the held-out loss: {evaluating.rows:,} of {of}"
            self._training.advance(None, evaluating.step, detail=detail)

    def answering(self, done: int, total: int, tokens: int) -> None:
        if self._run and not self._quiet:
            detail = f"sampling: {done:,} of {count_noun(total, 'completion')}, {tokens:,} tokens"
            self._training.advance(None, self._run.state.step, detail=detail)

    def logged(self, line: Mapping[str, float], adapter: str | None) -> None:
        self._hardware = hardware(line) or self._hardware

    def step(self, result: StepResult) -> None:
        row = self._rows[result.adapter]
        is_first = row.result is None
        row.add(result)
        with suppress(OSError):  # an unwritable stdout does not end a run
            super().close()
            if self._quiet:
                self._print(row, result, is_first)
            elif self._run:
                heldout = f"  held-out {row.heldout}" if row.heldout else ""
                below = "  ".join(filter(None, [row.trend.bars(), *self._below()]))
                detail = f"{_facts(row, result)}{heldout}\n{below}"
                self._training.advance(None, result.step, result.total_steps or None, detail)
            else:
                self._show_table()

    def _print(self, row: Row, result: StepResult, is_first: bool) -> None:
        evaluated, now = result.eval_loss is not None, time.monotonic()
        if not (is_first or row.run.logs(result.step, evaluated) or now - row.last_line >= OFTEN):
            return
        row.last_line = now
        mark = f"{result.adapter}  " if result.adapter else ""
        remaining = f"  {duration(left)} left" if (left := row.seconds_left()) else ""
        heldout = f"  held-out {row.heldout}" if evaluated else ""
        epoch = f"{result.step}/{result.total_steps}  epoch {result.epoch:.2f}"
        line("step", f"{mark}{epoch}  {_facts(row, result)}{remaining}{heldout}")

    def _below(self) -> list[str]:
        """Below a bar or a table on a terminal: memory, and the hardware."""
        from wgpu_lora.train.memory import format_bytes

        return [f"{format_bytes(self._session.device.allocated)} on the device", self._hardware]

    def _show_table(self) -> None:
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=console(stderr=True), refresh_per_second=4)
            self._live.start()
        self._live.update(self.table())

    def table(self) -> Any:
        """The current table of several adapters."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=None, pad_edge=False)
        table.add_column("adapter")
        for column in COLUMNS:
            table.add_column(column, justify="right")
        steps = {name: row.result.step if row.result else row.run.state.step for name, row in self._rows.items()}
        for name, row in self._rows.items():
            result, share = row.result, f"{steps[name] / max(1, sum(steps.values())):.0%}"
            cells = [str(steps[name]), *[""] * 6, share, ""]
            if result:
                seconds = max(result.seconds, 1e-9)
                cells = [
                    f"{result.step}/{result.total_steps}",
                    f"{result.epoch:.2f}",
                    f"{'reward ' if 'reward' in result.metrics else ''}{result.progress:.4f}",
                    row.heldout,
                    f"{result.tokens:,}",
                    f"{result.step_tokens / seconds:,.0f}",
                    f"{result.step_processed_tokens / seconds:,.0f}",
                    share,
                    row.trend.bars(TREND),
                ]
            table.add_row(Text(escape_unprintable(name or "")), *cells)
        left = [row.seconds_left() for row in self._rows.values()]
        seconds_left = 0.0 if None in left else sum(filter(None, left))
        below = [f"{duration(seconds_left)} left" if seconds_left else "", *self._below()]
        table.caption, table.caption_justify = ", ".join(filter(None, below)), "left"
        return table


def _facts(row: Row, result: StepResult) -> str:
    """The figures of a step, with the speed of the last ones."""
    return result.facts() + (f"  {speed(*row.sums)}" if row.recent else "")


def training_steps(recent: Sequence[tuple[int, float]]) -> list[float]:
    """The seconds of steps that trained on tokens, or of all if none did, given (trained tokens, seconds) of each."""
    return [seconds for trained, seconds in recent if trained] or [seconds for _, seconds in recent]


def speed(trained: int, processed: int, seconds: float) -> str:
    """Both rates, since other programs count either."""
    seconds = max(seconds, 1e-9)
    return f"{trained / seconds:,.0f} trained, {processed / seconds:,.0f} processed tokens/s"


def report(
    records: Mapping[str | None, RunRecord],
    command: str | None = None,
    adapter: str | None = None,
    before: Collection[str] = (),
    home: Path | None = None,
) -> int:
    """Print how each run ended and where its adapter is; returns the exit code.

    Args:
        records: by the adapter's name; None is a single run.
        command: that continues an interrupted run; '' prints none.
        adapter: where it is, if not in the run's directory.
        before: warnings that were printed before training.
        home: the directory that the runs are resumed from; by default the first one's.
    """
    from wgpu_lora.train.run.stop_reasons import STOP_TEXT, exit_code

    for name, record in records.items():
        mark, outcome = f"{name}: " if name else "", record.outcome
        line(outcome, f"{mark}{describe_end(record, adapter)}")
        if best := describe_best(record, adapter):
            line("best", mark + best)
        if outcome == "failed":
            reason = record.stop_reason
            who = f"adapter {name}: " if name else ""
            print(f"wgpu-lora: {who}{STOP_TEXT[reason]}: {CURES[reason]}.", file=sys.stderr)
        for text in record.warnings:
            if text not in before:
                line("warning", mark + text)
        if record.damaged_log_lines:
            line("log", f"{mark}dropped {count_noun(record.damaged_log_lines, 'damaged line')} of log.jsonl")
    if command != "" and any(record.outcome == "interrupted" for record in records.values()):
        output = shlex.quote(str(home or next(iter(records.values())).directory))
        line("continue", command or f"{program()} finetune --output {output} --resume", whole=True)
    return max(exit_code(record.stop_reason, record.signal) for record in records.values())


NOT_OF_JOBS = ("recipe", "adapters", "adapters_config", "schedule", "batch_tokens")


def run_protected(ctx: typer.Context, path: Path, nonce: str | None) -> int:
    """Run a protected job."""
    refuse_unused(ctx, NOT_OF_JOBS, "with --protected, whose file has all of that")
    from wgpu_lora.protect import check_libraries

    check_libraries()
    from wgpu_lora.protect.runs import protected_job as jobs
    from wgpu_lora.protect.runs.protected_run import finetune_protected

    options = given_options(ctx)
    resume = bool(options.pop("resume", False))
    job = jobs.read_job(path)
    try:
        record = finetune_protected(job, resume=resume, nonce=nonce, watch=_watched, say=line, **options)
    except (UserError, OSError):
        raise
    except Exception as error:  # terminals are logged, too
        text = f"{type(error).__name__}: a fault of the program; its message may have something of the rows"
        typer.echo(
            "".join(traceback.format_tb(error.__traceback__)) + f"wgpu-lora: {text}, so it is left out", err=True
        )
        return 1
    command = f"{program()} finetune --protected {shlex.quote(str(path))} --resume"
    code = report({None: record.run}, command, str(record.adapter))
    cleanup = record.cleanup
    wiped = "all that can be overwritten was" if cleanup["complete"] else f"not all: {cleanup['not_wiped'][0]}"
    line("cleanup", f"{wiped}; cleanup.json lists what was, and what cannot be")
    line("open", f"{program()} protect open {shlex.quote(str(record.adapter))} --key KEY -o ADAPTER", whole=True)
    where, key = shlex.quote(str(record.directory)), shlex.quote(str(job.broker_file))
    line("check", f"{program()} protect check {where} --broker-key {key}", whole=True)
    return code


@contextmanager
def _watched(job: Job[Any]) -> Iterator[Events]:
    from wgpu_lora.cli.run_summary import describe

    describe(job)
    with TrainingProgress(job) as watcher:
        yield watcher


CURVES = "losses.png"


def draw_curves(runs: Mapping[str, Path], path: Path) -> bool:
    """Plot every run's training loss and, if measured, held-out loss by step; returns False without matplotlib.

    Args:
        runs: name -> directory of its log.jsonl.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # the object API: no window and no global state
    except ImportError:
        return False
    with rc_context({"text.parse_math": False}):  # an adapter's name may contain dollar signs
        figure = Figure(figsize=(9, 5), layout="constrained")
        _draw(figure.subplots(), runs)
        figure.savefig(path, dpi=120)
    return True


def _draw(axes: Any, runs: Mapping[str, Path]) -> None:
    from wgpu_lora.train.run.training_log import LOG, read_log

    for number, (name, directory) in enumerate(runs.items()):
        log = read_log(directory / LOG) if (directory / LOG).is_file() else []
        colour, label = f"C{number % 10}", escape_unprintable(name)
        trained = [(entry["step"], entry["loss"]) for entry in log if "loss" in entry]
        axes.plot(*zip(*trained, strict=True) if trained else ([], []), color=colour, label=label)
        heldout = [(entry["step"], entry["eval_loss"]) for entry in log if "eval_loss" in entry]
        if heldout:
            steps, losses = zip(*heldout, strict=True)
            axes.plot(steps, losses, color=colour, linestyle="--", marker="o", markersize=4, label=f"{label}, held out")
    axes.set_xlabel("optimizer steps of the adapter")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    if runs:
        axes.legend()
