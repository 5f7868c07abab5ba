"""What a page says of a run, each a line of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.ending import OUTCOMES, STOP_TEXT
from wgpu_lora.train.memory import readable
from wgpu_lora.train.records import RunRecord

Fact = Callable[[RunRecord], str]
OWN = ("output", "resume")  # options that say nothing of what was trained
NONE = "none"


def number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def span(seconds: float) -> str:
    """A time as a person says it: 9.7 s, 12 min 05 s, 3 h 12 min."""
    if seconds < 100:
        return f"{seconds:,.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60:02} min"


def model_of(run: RunRecord) -> str:
    return run.options.model or "demo"


def steps_of(run: RunRecord) -> str:
    return f"{run.state.step:,} of {run.state.total_steps:,}"


def ended(run: RunRecord) -> str:
    """Finished, stopped early, interrupted or failed, and why where that says more."""
    reason = run.stop_reason
    outcome = OUTCOMES.get(reason, reason)
    return f"{outcome} ({STOP_TEXT[reason].partition(';')[0]})" if outcome == "failed" else outcome


def _loss(name: str) -> Fact:
    return lambda run: number(getattr(run.state, name))


def _best(run: RunRecord) -> str:
    best = run.state.best_eval_loss
    return number(best) if best is None else f"{number(best)}, step {run.state.best_step:,}"


LOSSES: dict[str, Fact] = {
    "training loss, last": _loss("last_loss"),
    "held-out loss, before": _loss("first_eval_loss"),
    "held-out loss, last": _loss("last_eval_loss"),
    "held-out loss, best": _best,
    "steps": steps_of,
    "ended": ended,
}
COSTS: dict[str, Fact] = {
    "time": lambda run: span(run.state.seconds),
    "trained tokens": lambda run: f"{run.state.tokens:,}",
    "trained parameters": lambda run: f"{run.trainable_parameters:,}",
    "peak device memory": lambda run: readable(run.memory.peak),
    "device": lambda run: f"{run.environment.device.name}, {run.environment.device.backend}",
}
# What a run is of beside its options; a digest tells files apart that have one name.
RECORD: dict[str, Fact] = {
    "training data": lambda run: run.data.summary,
    "training data, SHA-256": lambda run: run.data.digest,
    "held-out data, SHA-256": lambda run: run.eval_data.digest if run.eval_data else NONE,
    "base, SHA-256": lambda run: run.base_digest,
    "initial adapter, SHA-256": lambda run: run.init_adapter_sha256 or NONE,
    "device": lambda run: ", ".join(vars(run.environment.device)[name] for name in ("name", "driver", "backend")),
    "versions": lambda run: ", ".join(f"{k} {v}" for k, v in run.environment.versions.items()),
}
RESULT: dict[str, Fact] = {
    "adapter, SHA-256": lambda run: run.adapter_sha256,
    "peak device memory": lambda run: f"{run.memory.peak:,} bytes",
}


def settings(run: RunRecord) -> dict[str, str]:
    """A run's options as its command line has them."""
    options = {**run.options.as_dict(), "model": model_of(run)}
    return {flag: _shown(options[name]) for name in sorted(options) if name not in OWN for flag in [_flag(name)]}


def defaults() -> dict[str, str]:
    """The options of a run of which nothing was said."""
    return {_flag(name): _shown(value) for name, value in asdict(TrainingArguments()).items()}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def summary(name: str, run: RunRecord, speeds: Sequence[str]) -> str:
    """A Markdown line for a run log."""
    state, options, device = run.state, run.options, run.environment.device
    losses = [f"loss {number(state.last_loss)}"]
    if state.last_eval_loss is not None:
        first = state.first_eval_loss
        seen = [] if first is None else [f"{number(first)} before"]
        seen += [] if state.best_eval_loss is None else [f"best {number(state.best_eval_loss)}"]
        losses.append(f"held-out {number(state.last_eval_loss)}" + (f" ({', '.join(seen)})" if seen else ""))
    speed = f"{', '.join(speeds)} tokens/s" if speeds else "speed not logged"
    what = f"{model_of(run)}, rank {options.lora_r} on {options.target_modules}"
    memory = f"{readable(run.memory.peak)} of device memory"
    return (
        f"- **{name}**: {what}, {steps_of(run)} steps ({ended(run)}), {', '.join(losses)}, "
        f"{span(state.seconds)}, {speed}, {memory}, on {device.name}, {device.driver}"
    )
