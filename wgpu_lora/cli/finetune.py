"""wgpu-lora finetune: train an adapter on data."""

from __future__ import annotations

import shlex
import sys
import time
import traceback
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.console import FEWEST, OF_ADAPTERS, OFTEN, Bar, console, is_terminal, line, next_commands
from wgpu_lora.cli.parameters import choice, refuse_unused
from wgpu_lora.cli.run_summary import CURES, describe, describe_answers, losses
from wgpu_lora.cli.training_progress import StartupProgress, Trend, hardware
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, StepResult
from wgpu_lora.installation import pip_line, program
from wgpu_lora.text import count_noun, duration, escape_unprintable
from wgpu_lora.train.loop.slot_policy import POLICIES
from wgpu_lora.train.options.option_fields import ADAPTER, FILES
from wgpu_lora.train.options.training_arguments import TrainingArguments

if TYPE_CHECKING:
    from wgpu_lora.events import Events
    from wgpu_lora.train.adapter_tasks import AdapterTask
    from wgpu_lora.train.finetune import FinetuneJob
    from wgpu_lora.train.pipeline import PipelineJob
    from wgpu_lora.train.run.records import PipelineRecord, RunRecord


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
ANSWERS = 16
Answers = Annotated[
    int,
    typer.Option(
        help="Held-out rows that are answered at the end, beside their own answers. [x>=0]", rich_help_panel=FILES
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
    answers: Answers = ANSWERS,
) -> int:
    """Train a LoRA adapter on your data, or several over one base model.

    Without --model and --data, the demo model is trained on the demo's data.
    """
    if answers < 0:
        raise UserError(f"--answers must be 0 or more, not {answers}.")
    if note:
        line("recipe", note)
    if adapters or adapters_config:
        return train_pipeline(args, adapters or [], adapters_config, schedule, batch_tokens)
    if args.resume:
        from wgpu_lora.train.run.pipeline_state import home_of

        home = home_of(args.directory)
        if home:
            return resume_pipeline(args, home)
    from wgpu_lora.train.finetune import prepare_job

    job = prepare_job(args)
    describe(job)
    with TrainingProgress(job) as watcher:
        record = job.train(watcher)
    code = report_run(record, before=job.run.start_warnings)
    if record.outcome in ("finished", "stopped early"):
        describe_answers(job, record, answers)
        next_commands(record.directory, OF_ADAPTERS)
    return code


class TrainingProgress(StartupProgress):
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
        self._last_line = 0.0
        self._heldout = ""
        self._trend, self._hardware = Trend(sys.stderr), ""
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=SMOOTHED)  # (trained, processed, seconds) per step

    def __enter__(self) -> TrainingProgress:
        if not self._tensors_to_load:
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
            of = count_noun(evaluating.total, "row")
            detail = f"measuring the held-out loss: {evaluating.rows:,} of {of}"
            self._training.advance(None, evaluating.step, detail=detail)

    def answering(self, done: int, total: int, tokens: int) -> None:
        if not self._quiet:
            detail = f"sampling: {done:,} of {count_noun(total, 'completion')}, {tokens:,} tokens"
            self._training.advance(None, self._run.state.step, detail=detail)

    def logged(self, line: Mapping[str, float], adapter: str | None) -> None:
        self._hardware = hardware(line) or self._hardware

    def step(self, result: StepResult) -> None:
        self._trend.add(result.progress)
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
        if self._first or self._run.logs(result.step, evaluated) or now - self._last_line >= OFTEN:
            self._last_line = now
            suffix = self._remaining(result) + (self._heldout if evaluated else "")
            line("step", f"{result.step}/{result.total_steps}  epoch {result.epoch:.2f}  {text}{suffix}")

    def _below(self) -> str:
        """The second line on a terminal: the trend of the loss, memory, and the hardware."""
        from wgpu_lora.train.memory import format_bytes

        allocated = format_bytes(self._session.device.allocated)
        return "  ".join(filter(None, [self._trend.bars(), f"{allocated} on the device", self._hardware]))

    def _remaining(self, result: StepResult) -> str:
        """The estimated time of the remaining steps, from the last ones."""
        if len(self._recent) < FEWEST or result.step >= result.total_steps:
            return ""
        step_seconds = fmean(training_steps([(trained, seconds) for trained, _, seconds in self._recent]))
        return f"  {duration(step_seconds * (result.total_steps - result.step))} left"


def training_steps(recent: Sequence[tuple[int, float]]) -> list[float]:
    """The seconds of steps that trained on tokens, or of all if none did, given (trained tokens, seconds) of each."""
    return [seconds for trained, seconds in recent if trained] or [seconds for _, seconds in recent]


def speed(trained: int, processed: int, seconds: float) -> str:
    """Both rates, since other programs count either."""
    seconds = max(seconds, 1e-9)
    return f"{trained / seconds:,.0f} trained, {processed / seconds:,.0f} processed tokens/s"


def report_run(
    record: RunRecord, command: str | None = None, adapter: str | None = None, before: Collection[str] = ()
) -> int:
    """Print how the run ended and where its adapter is; returns the exit code.

    command: that continues an interrupted run; '' prints none. adapter: where it is, if not in the run's directory.
    before: warnings that were printed before training.
    """
    from wgpu_lora.train.run.stop_reasons import STOP_TEXT, exit_code

    state, reason, outcome, output = record.state, record.stop_reason, record.outcome, record.directory
    timed = reason == "target seconds"  # its number of steps is only known at the end
    count = count_noun(state.step, "step") if timed else f"{state.step:,} of {count_noun(state.total_steps, 'step')}"
    seconds = state.elapsed_seconds if record.options.target_seconds else state.seconds
    why = f"{count} in {seconds:,.1f} s ({STOP_TEXT[reason]})"
    summary = losses(output, state.last_loss, state.first_eval_loss, state.trained_eval_loss)
    scales = record.options.train == "quant-scales"
    where = f"the models are in {output}/last-f16 and others" if scales else f"the adapter is in {adapter or output}"
    line(outcome, "; ".join([why, *summary, where]))
    if state.best_step and state.best_step < state.step:
        best = f"held-out loss {state.best_eval_loss:.4f} after step {state.best_step:,}"
        place, noun = ("best-f16", "model") if scales else ("best", "adapter")
        line("best", f"{f'{output / place}.tar.age' if adapter else output / place} has the best {noun}: {best}")
    if outcome == "interrupted" and command != "":
        continuation = command or f"{program()} finetune --output {shlex.quote(str(output))} --resume"
        line("continue", continuation, whole=True)
    if outcome == "failed":
        print(f"wgpu-lora: {STOP_TEXT[reason]}: {CURES[reason]}.", file=sys.stderr)
    for text in record.warnings:
        if text not in before:
            line("warning", text)
    if record.damaged_log_lines:
        line("log", f"dropped {count_noun(record.damaged_log_lines, 'damaged line')} of log.jsonl")
    return exit_code(reason, record.signal)


RECENT, TREND = 10, 10  # steps that times are averaged over, and bars of a loss


def train_pipeline(
    args: TrainingArguments, pairs: list[str], config: Path | None, schedule: str, batch_tokens: int | None
) -> int:
    """Train, show progress and report; returns the exit code."""
    from wgpu_lora.train.adapter_tasks import named_tasks

    return _train(args, named_tasks(pairs, config), schedule, batch_tokens)


def resume_pipeline(args: TrainingArguments, home: Path) -> int:
    """Resume the pipeline whose record is in a directory."""
    from wgpu_lora.train.adapter_tasks import tasks_of_request
    from wgpu_lora.train.run.pipeline_state import read_pipeline_state

    request = read_pipeline_state(home).request
    return _train(args, tasks_of_request(request, home), request["schedule"], request["batch_tokens"])


def _train(args: TrainingArguments, tasks: list[AdapterTask], schedule: str, batch_tokens: int | None) -> int:
    from wgpu_lora.train.pipeline import prepare_pipeline

    job = prepare_pipeline(args, tasks, schedule, batch_tokens)
    describe(job)
    line(
        "pipeline", f"{count_noun(len(job.runs), 'adapter')}, {schedule}, batches of up to {job.batch_tokens:,} tokens"
    )
    with PipelineTable(job) as table:
        record = job.train(table)
    code = report_pipeline(record, job.home, [text for run in job.runs for text in run.start_warnings])
    if draw_curves({run.adapter_name: run.directory for run in job.runs}, job.home / CURVES):
        line("curves", str(job.home / CURVES))
    else:
        line("curves", f"not plotted: matplotlib is missing; {pip_line('plot')}")
    if all(adapter.outcome in ("finished", "stopped early") for adapter in record.adapters):
        adapters = " ".join(shlex.quote(f"{adapter.name}={adapter.checkpoint}") for adapter in record.adapters)
        line("next", f"{program()} serve --lora-modules {adapters}", whole=True)
    return code


def report_pipeline(record: PipelineRecord, home: Path, before: Collection[str] = ()) -> int:
    """Print how each adapter ended and where it is; returns the exit code. before: see `report_run`."""
    from wgpu_lora.train.run.stop_reasons import STOP_TEXT, exit_code

    outcomes = []
    for adapter in record.adapters:
        outcome, text = adapter.outcome, STOP_TEXT[adapter.stop_reason]
        outcomes.append(outcome)
        why = f"{adapter.name}: {adapter.step:,} of {count_noun(adapter.total_steps, 'step')} ({text})"
        result = adapter.losses
        summary = losses(Path(adapter.checkpoint), result.train, result.before, result.held_out)
        line(outcome, "; ".join([why, *summary, f"the adapter is in {adapter.checkpoint}"]))
        if outcome == "failed":
            print(f"wgpu-lora: adapter {adapter.name}: {text}: {CURES[adapter.stop_reason]}.", file=sys.stderr)
        for warning in adapter.warnings:
            if warning not in before:
                line("warning", f"{adapter.name}: {warning}")
    if "interrupted" in outcomes:
        line("continue", f"{program()} finetune --output {shlex.quote(str(home))} --resume", whole=True)
    return max(exit_code(adapter.stop_reason, record.signal) for adapter in record.adapters)


class PipelineTable(StartupProgress):
    """A live table on a terminal, with a row per adapter; else lines as for a single run."""

    def __init__(self, job: PipelineJob):
        super().__init__(job)
        self._runs = {run.adapter_name: run for run in job.runs}
        self._last_lines: dict[str, float] = {}
        self._rows: dict[str, StepResult | None] = {run.adapter_name: None for run in job.runs}
        self._heldout: dict[str, float] = {}
        self._steps = job.state.step
        self._own = {run.adapter_name: job.state.steps.get(run.adapter_name, 0) for run in job.runs}
        self._trends = {run.adapter_name: Trend(sys.stderr) for run in job.runs}
        self._seconds: dict[str, deque[tuple[int, float]]] = {
            run.adapter_name: deque(maxlen=RECENT) for run in job.runs
        }
        self._device, self._hardware = job.session.device, ""
        self._live: Any = None

    def __enter__(self) -> PipelineTable:
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
        self._trends[result.adapter].add(result.progress)
        self._seconds[result.adapter].append((result.step_tokens, result.seconds))
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
        is_due = now - self._last_lines.get(name, -OFTEN) >= OFTEN  # always for the first step
        if is_due or self._runs[name].logs(result.step, evaluated):
            self._last_lines[name] = now
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

        from wgpu_lora.train.memory import format_bytes

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
                table.add_row(Text(escape_unprintable(name)), str(self._own[name]), *[""] * 6, share, "")
                continue
            heldout = f"{self._heldout[name]:.4f}" if name in self._heldout else ""
            seconds = max(result.seconds, 1e-9)
            table.add_row(
                Text(escape_unprintable(name)),
                f"{result.step}/{result.total_steps}",
                f"{result.epoch:.2f}",
                f"{'reward ' if 'reward' in result.metrics else ''}{result.progress:.4f}",
                heldout,
                f"{result.tokens:,}",
                f"{result.step_tokens / seconds:,.0f}",
                f"{result.step_processed_tokens / seconds:,.0f}",
                share,
                self._trends[name].bars(TREND),
            )
        below = [self._remaining(), f"{format_bytes(self._device.allocated)} on the device", self._hardware]
        table.caption, table.caption_justify = ", ".join(filter(None, below)), "left"
        return table

    def _remaining(self) -> str:
        """The estimated time of the remaining steps of all adapters, from the last ones."""
        rows = [(result, self._seconds[name]) for name, result in self._rows.items() if result]
        seconds = sum((result.total_steps - result.step) * fmean(training_steps(recent)) for result, recent in rows)
        return f"{duration(seconds)} left" if seconds > 0 and len(rows) == len(self._rows) else ""


NOT_OF_JOBS = ("recipe", "adapters", "adapters_config", "schedule", "batch_tokens")


def run_protected(
    ctx: typer.Context, options: dict[str, Any], recipe: str | None, values: dict[str, Any]
) -> int | None:
    """Run the command with --protected; None without it."""
    path: Path | None = values.get("protected")
    if path is None:
        refuse_unused(ctx, ("nonce",), "without --protected")
        return None
    refuse_unused(ctx, NOT_OF_JOBS, "with --protected, whose file has all of that")
    from wgpu_lora.protect import check_libraries

    check_libraries()
    from wgpu_lora.protect.runs import protected_job as jobs
    from wgpu_lora.protect.runs.protected_run import finetune_protected

    resume = bool(options.pop("resume", False))
    job = jobs.read_job(path)
    try:
        record = finetune_protected(job, resume=resume, nonce=values.get("nonce"), watch=_watched, say=line, **options)
    except (UserError, OSError):
        raise
    except Exception as error:  # terminals are logged, too
        text = f"{type(error).__name__}: a fault of the program; its message may have something of the rows"
        typer.echo(
            "".join(traceback.format_tb(error.__traceback__)) + f"wgpu-lora: {text}, so it is left out", err=True
        )
        return 1
    command = f"{program()} finetune --protected {shlex.quote(str(path))} --resume"
    code = report_run(record.run, command, str(record.adapter))
    cleanup = record.cleanup
    wiped = "all that can be overwritten was" if cleanup["complete"] else f"not all: {cleanup['not_wiped'][0]}"
    line("cleanup", f"{wiped}; cleanup.json lists what was, and what cannot be")
    line("open", f"{program()} protect open {shlex.quote(str(record.adapter))} --key KEY -o ADAPTER", whole=True)
    where, key = shlex.quote(str(record.directory)), shlex.quote(str(job.broker_file))
    line("check", f"{program()} protect check {where} --broker-key {key}", whole=True)
    return code


@contextmanager
def _watched(job: FinetuneJob) -> Iterator[Events]:
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
