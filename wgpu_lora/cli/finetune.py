"""wgpu-lora finetune: from a model and a JSONL file to an adapter."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from wgpu_lora.cli.console import Bar, is_terminal, line
from wgpu_lora.train.arguments import TrainingArguments

if TYPE_CHECKING:
    from wgpu_lora.train.finetune import Job
    from wgpu_lora.train.progress import StepResult

SMOOTHED = 10  # steps whose speed is shown
EXIT_CODES = {"non-finite": 1, "interrupt": 130}


def finetune(args: TrainingArguments, note: str | None) -> int:
    """Train a LoRA adapter on a JSONL file.

    Without --model and --data, it trains the demo model on the demo's own data.
    """
    from wgpu_lora.train.finetune import prepare_job

    if note:
        line("recipe", note)
    job = prepare_job(args)
    describe(job)
    with Watcher(job) as watcher:
        facts = job.train(watcher.step, watcher.loaded)
    return report(facts, args.output)


def describe(job: Job) -> None:
    """What is about to run, a line each."""
    from wgpu_lora.train.memory import readable

    session, run = job.session, job.run
    model, device, args = session.model, session.device, run.args
    config, plan = model.config, session.memory()
    subgroups = f"subgroups of {device.subgroup_size}" if device.subgroup_size else "no subgroups"
    line("device", f"{device.info.name}, {device.info.driver}, {device.info.backend}, {subgroups}")
    line(
        "model",
        f"{model.name}: {config.architecture}, {config.num_hidden_layers} layers of {config.hidden_size}, "
        f"vocabulary {config.vocab_size:,}, weights in {model.decoder.base_dtype}",
    )
    line("data", run.stream.prepared.summary())
    if run.heldout:
        line("held out", run.heldout.summary())
    trained = session.adapters.trainable(run.slot, config)
    line("adapter", f"rank {run.spec.rank} on {args.target_modules}: {trained:,} trained parameters")
    line("memory", f"{readable(plan.peak)} at the peak ({plan.peak:,} bytes)")
    tuner = job.tuner()
    untimed = tuner.untimed(session.programs()) if tuner else 0
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
        self._loading.close()
        text = f"loss {result.loss:.4f}  lr {result.learning_rate:.2e}"
        if self._tokens is not None:  # the first step compiles, so its time says nothing
            self._recent.append((result.tokens - self._tokens, result.seconds))
            text += f"  {self._speed():,.0f} tokens/s"
        self._tokens = result.tokens
        if result.eval_loss is not None:
            text += f"  held-out {result.eval_loss:.4f}"
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
    if reason == "non-finite":
        print(f"wgpu-lora: {STOP_TEXT[reason]}.", file=sys.stderr)
    return EXIT_CODES.get(reason, 0)
