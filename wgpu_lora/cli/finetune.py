"""wgpu-lora finetune: from a model and a data file to an adapter."""

from __future__ import annotations

import signal
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.console import Bar, is_terminal, line
from wgpu_lora.train.arguments import ADAPTER, FILES, TrainingArguments

if TYPE_CHECKING:
    from wgpu_lora.share import Entry
    from wgpu_lora.train.job import Job
    from wgpu_lora.train.progress import StepResult

SMOOTHED = 10  # steps whose speed is shown
FAILED = ("non-finite", "diverged")
CURES = "lower --learning-rate, or look for odd rows in the data"
# Options of a pipeline, which `plan` has too.
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        help="DATA:CHECKPOINT of an adapter; given several times, all are trained over one base.",
        metavar="DATA:CHECKPOINT",
        rich_help_panel=FILES,
    ),
]
AdaptersConfig = Annotated[
    Path | None,
    typer.Option(help="TOML file with an [[adapter]] table for each, with options of its own.", rich_help_panel=FILES),
]
Schedule = Annotated[
    str,
    typer.Option(
        help="Which adapters take a step: synchronized, round-robin or priority-val-loss.", rich_help_panel=ADAPTER
    ),
]
BatchTokens = Annotated[
    int | None, typer.Option(help="Most tokens of a batch that several adapters share.", rich_help_panel=ADAPTER)
]


def finetune(
    args: TrainingArguments,
    note: str | None,
    adapters: Adapters = None,
    adapters_config: AdaptersConfig = None,
    schedule: Schedule = "synchronized",
    batch_tokens: BatchTokens = None,
) -> int:
    """Train a LoRA adapter on a data file, or several over one base.

    Without --model and --data, it trains the demo model on the demo's own data.
    """
    if note:
        line("recipe", note)
    if adapters or adapters_config:
        from wgpu_lora.cli.pipeline import train_pipeline

        return train_pipeline(args, adapters or [], adapters_config, schedule, batch_tokens)
    from wgpu_lora.train.finetune import prepare_job

    job = prepare_job(args)
    describe(job)
    with Watcher(job) as watcher:
        facts = job.train(watcher.step, watcher.loaded, waiting)
    return report(facts, args.output)


def waiting(place: int, holders: list[Entry], seconds: float) -> None:
    """A line for each look of a run that queues for memory."""
    held = ", ".join(entry.who for entry in holders) or "nobody"
    line("waiting", f"place {place} in the queue, {seconds:.0f} s so far; the device's memory is held by {held}")


def describe(job: Job) -> None:
    """What is about to run, a line each."""
    from wgpu_lora.data.account import SKIPPED

    describe_model(job)
    for note in job.session.model.tokenizer.notes if job.session.model.tokenizer else ():
        line("note", note)
    for run in job.runs:
        mark = f"{run.name}: " if run.name else ""
        for label, data in (("data", run.stream.prepared), ("held out", run.heldout)):
            if data:
                line(label, mark + data.summary())
                for note in data.notes:
                    line("note", mark + note)
                if data.account.bad:
                    line("skipped", f"{mark}bad rows are set aside in {run.directory / SKIPPED}")
        trained = job.session.adapters.trainable(run.slot, job.session.model.config)
        modules = run.args.target_modules
        line("adapter", f"{mark}rank {run.spec.rank} on {modules}: {trained:,} trained parameters")
    describe_memory(job)


def describe_model(job: Job) -> None:
    session = job.session
    model, device = session.model, session.device
    config = model.config
    subgroups = f"subgroups of {device.subgroup_size}" if device.subgroup_size else "no subgroups"
    line("device", f"{device.info.name}, {device.info.driver}, {device.info.backend}, {subgroups}")
    line(
        "model",
        f"{model.name}: {config.architecture}, {config.num_hidden_layers} layers of {config.hidden_size}, "
        f"vocabulary {config.vocab_size:,}, weights in {model.decoder.base_dtype}",
    )


def describe_memory(job: Job) -> None:
    """The plan, and what has yet to be timed."""
    from wgpu_lora.train.memory import readable

    plan = job.session.memory()
    line("memory", f"{readable(plan.peak)} at the peak ({plan.peak:,} bytes)")
    tuner = job.tuner()
    untimed = tuner.untimed(job.session.programs()) if tuner else 0
    if tuner and untimed:
        line("tuning", f"{untimed} kernel sizes not timed on this device yet: at most {tuner.seconds:.0f} s now")


class Watcher:
    """Shows loading and training: bars on a terminal, else a line at every logging step."""

    def __init__(self, job: Job):
        self._every = job.run.args.logging_steps
        self._loading = Bar("loading", len(job.session.model.checkpoint.names()))
        self._training = Bar("training", None)
        self._quiet = not is_terminal(sys.stderr)
        self._tokens: int | None = None  # up to the step before
        self._recent: deque[tuple[int, float]] = deque(maxlen=SMOOTHED)  # tokens and seconds of the last steps

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loading.close()
        self._training.close()

    def loaded(self, name: str) -> None:
        self._loading.advance()

    def step(self, result: StepResult) -> None:
        text = f"loss {result.loss:.4f}  lr {result.learning_rate:.2e}"
        if self._tokens is not None:  # the first step compiles, so its time says nothing
            self._recent.append((result.tokens - self._tokens, result.seconds))
            text += f"  {self._speed():,.0f} tokens/s"
        self._tokens = result.tokens
        if result.eval_loss is not None:
            text += f"  held-out {result.eval_loss:.4f}"
        with suppress(OSError):  # a log that is full or gone does not end a run
            self._show(result, text)

    def _show(self, result: StepResult, text: str) -> None:
        self._loading.close()
        self._training.advance(text, result.step, result.total_steps or None)
        due = result.step % self._every == 0 or result.step == result.total_steps or result.eval_loss is not None
        if due and self._quiet:
            line("step", f"{result.step}/{result.total_steps}  epoch {result.epoch:.2f}  {text}")

    def _speed(self) -> float:
        return sum(tokens for tokens, _ in self._recent) / max(sum(seconds for _, seconds in self._recent), 1e-9)


def report(facts: dict[str, Any], output: str) -> int:
    """Why the run ended and where its adapter is; returns the exit code."""
    from wgpu_lora.train.trainer import STOP_TEXT

    state, reason = facts["state"], facts["stop_reason"]
    losses = [
        f"{name} {value:.4f}"
        for name, value in (
            ("loss", state["last_loss"]),
            ("held-out loss", state["last_eval_loss"]),
            ("best held-out loss", state["best_eval_loss"]),
        )
        if value is not None
    ]
    why = f"{STOP_TEXT[reason]} after {state['step']:,} steps and {state['seconds']:,.1f} s"
    line("stopped", "; ".join([why, *losses, f"the adapter is in {output}"]))
    if reason in FAILED:
        print(f"wgpu-lora: {STOP_TEXT[reason]}: {CURES}.", file=sys.stderr)
    if facts["damaged_log_lines"]:
        line("log", f"damaged lines of log.jsonl that were left out: {facts['damaged_log_lines']}")
    return exit_code(reason, facts["signal"])


def exit_code(reason: str, signal_name: str | None) -> int:
    """0, 1 for a run that failed, or what a shell gives a program that a signal ended."""
    if reason == "interrupt":
        return 128 + (signal.Signals[signal_name] if signal_name else signal.SIGINT)
    return 1 if reason in FAILED else 0
