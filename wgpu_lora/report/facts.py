"""What a page says of a run: its tables, by their labels, and a Markdown line."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from wgpu_lora.report.runs import SPEEDS, Run
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.ending import OUTCOMES, STOP_TEXT
from wgpu_lora.train.memory import readable

OWN = ("output", "resume")  # options that say nothing of what was trained
NONE = "none"
HELD_OUT = "held-out data, SHA-256"
Facts = dict[str, str]


def number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def span(seconds: float) -> str:
    """A time as a person says it: 9.7 s, 12 min 05 s, 3 h 12 min."""
    if seconds < 100:
        return f"{seconds:,.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60:02} min"


def losses(run: Run) -> Facts:
    state, reason = run.record.state, run.record.stop_reason
    outcome = OUTCOMES.get(reason, reason)
    best, at = state.best_eval_loss, f", step {state.best_step:,}"
    return {
        "training loss, last": number(state.last_loss),
        "held-out loss, before": number(state.first_eval_loss),
        "held-out loss, last": number(state.last_eval_loss),
        "held-out loss, best": number(best) + ("" if best is None else at),
        "steps": f"{state.step:,} of {state.total_steps:,}",
        "ended": f"{outcome} ({STOP_TEXT.get(reason, reason).partition(';')[0]})" if outcome == "failed" else outcome,
    }


def costs(run: Run) -> Facts:
    state, device, speeds = run.record.state, run.record.environment.device, run.speeds()
    return {
        "time": span(state.seconds),
        "trained tokens": f"{state.tokens:,}",
        "trained parameters": f"{run.record.trainable_parameters:,}",
        "peak device memory": readable(run.record.memory.peak),
        **{f"{kind} tokens/s": f"{speeds[kind]:,.0f}" if kind in speeds else "not logged" for kind in SPEEDS},
        "device": f"{device.name}, {device.backend}",  # the longest, so the last
    }


def origin(run: Run) -> Facts:
    """What a run is of beside its options; a digest tells files apart that have one name."""
    record, device = run.record, run.record.environment.device
    return {
        "training data": record.data.summary,
        "training data, SHA-256": record.data.digest,
        HELD_OUT: record.eval_data.digest if record.eval_data else NONE,
        "base, SHA-256": record.base_digest,
        "initial adapter, SHA-256": record.init_adapter_sha256 or NONE,
        "device": f"{device.name}, {device.driver}, {device.backend}",
        "versions": ", ".join(f"{name} {version}" for name, version in record.environment.versions.items()),
    }


def record(run: Run) -> Facts:
    """What identifies a run and its adapter."""
    peak = f"{run.record.memory.peak:,} bytes"
    return {**origin(run), "adapter, SHA-256": run.record.adapter_sha256, "peak device memory": peak}


def settings(run: Run) -> Facts:
    """A run's options as its command line has them."""
    return _flags(run.record.options.as_dict() | {"model": run.record.options.model or "demo"})


def defaults() -> Facts:
    """The options of a run of which nothing was said."""
    return _flags(asdict(TrainingArguments()))


def _flags(options: dict[str, Any]) -> Facts:
    return {f"--{name.replace('_', '-')}": _shown(options[name]) for name in sorted(options) if name not in OWN}


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def summary(run: Run) -> str:
    """A Markdown line for a run log."""
    state, options, device = run.record.state, run.record.options, run.record.environment.device
    found, cost = losses(run), costs(run)
    said = [f"loss {number(state.last_loss)}"]
    if state.last_eval_loss is not None:
        seen = {"{} before": state.first_eval_loss, "best {}": state.best_eval_loss}
        more = ", ".join(text.format(number(loss)) for text, loss in seen.items() if loss is not None)
        said.append(f"held-out {number(state.last_eval_loss)}" + (f" ({more})" if more else ""))
    speeds = ", ".join(f"{value:,.0f} {kind}" for kind, value in run.speeds().items())
    return (
        f"- **{run.name}**: {options.model or 'demo'}, rank {options.lora_r} on {options.target_modules}, "
        f"{found['steps']} steps ({found['ended']}), {', '.join(said)}, {cost['time']}, "
        f"{f'{speeds} tokens/s' if speeds else 'speed not logged'}, {cost['peak device memory']} of device memory, "
        f"on {device.name}, {device.driver}"
    )
