"""What a page says of a run, each a line of a table: read out of run.json all at once, so that damage shows at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.ending import OUTCOMES, STOP_TEXT
from wgpu_lora.train.memory import readable

Facts = Mapping[str, Any]
Fact = Callable[[Facts], str]
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


def model_of(facts: Facts) -> str:
    return str(facts["options"]["model"] or "demo")


def steps_of(facts: Facts) -> str:
    return f"{facts['state']['step']:,} of {facts['state']['total_steps']:,}"


def ended(facts: Facts) -> str:
    """Finished, stopped early, interrupted or failed, and why where that says more."""
    reason = str(facts["stop_reason"])
    outcome = OUTCOMES.get(reason, reason)
    return f"{outcome} ({STOP_TEXT[reason].partition(';')[0]})" if outcome == "failed" else outcome


def _loss(name: str) -> Fact:
    return lambda facts: number(facts["state"].get(name))  # runs of earlier versions have no loss before the first step


def _best(facts: Facts) -> str:
    state = facts["state"]
    best = state["best_eval_loss"]
    return number(best) if best is None else f"{number(best)}, step {state['best_step']:,}"


LOSSES: dict[str, Fact] = {
    "training loss, last": _loss("last_loss"),
    "held-out loss, before": _loss("first_eval_loss"),
    "held-out loss, last": _loss("last_eval_loss"),
    "held-out loss, best": _best,
    "steps": steps_of,
    "ended": ended,
}
COSTS: dict[str, Fact] = {
    "time": lambda facts: span(facts["state"]["seconds"]),
    "trained tokens": lambda facts: f"{facts['state']['tokens']:,}",
    "trained parameters": lambda facts: f"{facts['trainable_parameters']:,}",
    "peak device memory": lambda facts: readable(facts["memory"]["peak"]),
    "device": lambda facts: "{name}, {backend}".format(**facts["environment"]["device"]),
}
# What a run is of beside its options; a digest tells files apart that have one name.
RECORD: dict[str, Fact] = {
    "training data": lambda facts: str(facts["data"]["summary"]),
    "training data, SHA-256": lambda facts: str(facts["data"]["digest"]),
    "held-out data, SHA-256": lambda facts: str(facts["eval_data"]["digest"]) if facts["eval_data"] else NONE,
    "base, SHA-256": lambda facts: str(facts["base_digest"]),
    "initial adapter, SHA-256": lambda facts: str(facts["init_adapter_sha256"] or NONE),
    "device": lambda facts: "{name}, {driver}, {backend}".format(**facts["environment"]["device"]),
    "versions": lambda facts: ", ".join(f"{k} {v}" for k, v in facts["environment"]["versions"].items()),
}
RESULT: dict[str, Fact] = {
    "adapter, SHA-256": lambda facts: str(facts["adapter_sha256"]),
    "peak device memory": lambda facts: f"{facts['memory']['peak']:,} bytes",
}


def settings(facts: Facts) -> dict[str, str]:
    """A run's options as its command line has them."""
    options = {**facts["options"], "model": model_of(facts)}
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


def summary(name: str, facts: Facts, speeds: Sequence[str]) -> str:
    """A Markdown line for a run log."""
    state, options, device = facts["state"], facts["options"], facts["environment"]["device"]
    losses = [f"loss {number(state['last_loss'])}"]
    if state["last_eval_loss"] is not None:
        first = state.get("first_eval_loss")
        seen = [] if first is None else [f"{number(first)} before"]
        seen += [] if state["best_eval_loss"] is None else [f"best {number(state['best_eval_loss'])}"]
        losses.append(f"held-out {number(state['last_eval_loss'])}" + (f" ({', '.join(seen)})" if seen else ""))
    speed = f"{', '.join(speeds)} tokens/s" if speeds else "speed not logged"
    what = f"{model_of(facts)}, rank {options['lora_r']} on {options['target_modules']}"
    memory = f"{readable(facts['memory']['peak'])} of device memory"
    return (
        f"- **{name}**: {what}, {steps_of(facts)} steps ({ended(facts)}), {', '.join(losses)}, "
        f"{span(state['seconds'])}, {speed}, {memory}, on {device['name']}, {device['driver']}"
    )
