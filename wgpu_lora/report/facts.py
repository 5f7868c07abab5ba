"""What a page says of a run, each a line of `ROWS`: read out of run.json all at once, so that damage shows at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]


def _loss(name: str) -> Callable[[Facts], str]:
    return lambda facts: number(facts["state"][name])


def _option(*names: str) -> Callable[[Facts], str]:
    return lambda facts: ", ".join(str(facts["options"][name]) for name in names)


def number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def model_of(facts: Facts) -> str:
    return str(facts["options"]["model"] or "demo")


ROWS: dict[str, Callable[[Facts], str]] = {
    "base model": model_of,
    "base weights, arithmetic": _option("base_dtype", "compute_dtype"),
    "rank, alpha, dropout": _option("lora_r", "lora_alpha", "lora_dropout"),
    "targets": _option("target_modules"),
    "trained parameters": lambda facts: f"{facts['trainable_parameters']:,}",
    "data": lambda facts: str(facts["data"]["summary"]),  # which begins with the file's name
    "learning rate": _option("learning_rate", "lr_scheduler_type"),
    "steps": lambda facts: f"{facts['state']['step']:,} of {facts['state']['total_steps']:,}",
    "ended because of": lambda facts: str(facts["stop_reason"]),
    "seconds": lambda facts: f"{facts['state']['seconds']:,.1f}",
    "trained tokens": lambda facts: f"{facts['state']['tokens']:,}",
    "final loss": _loss("last_loss"),
    "held-out loss": _loss("last_eval_loss"),
    "best held-out loss": _loss("best_eval_loss"),
    "peak device memory": lambda facts: f"{facts['memory']['peak']:,} bytes",
    "device": lambda facts: "{name}, {driver}, {backend}".format(**facts["environment"]["device"]),
    "versions": lambda facts: ", ".join(f"{k} {v}" for k, v in facts["environment"]["versions"].items()),
    "adapter SHA-256": lambda facts: str(facts["adapter_sha256"]),
}


def summary(name: str, facts: Facts, speeds: Sequence[float]) -> str:
    """A Markdown line for a run log."""
    state, options, device = facts["state"], facts["options"], facts["environment"]["device"]
    losses = [f"loss {number(state['last_loss'])}"]
    if state["last_eval_loss"] is not None:
        losses.append(f"held-out {number(state['last_eval_loss'])} (best {number(state['best_eval_loss'])})")
    middle = sorted(speeds)[len(speeds) // 2 :][:1]
    speed = f"{middle[0]:,.0f} tokens/s" if middle else "speed not logged"
    what = f"{model_of(facts)}, rank {options['lora_r']} on {options['target_modules']}"
    steps = f"{state['step']:,} of {state['total_steps']:,} steps ({facts['stop_reason']})"
    memory = f"{facts['memory']['peak']:,} bytes of device memory"
    return (
        f"- **{name}**: {what}, {steps}, {', '.join(losses)}, {state['seconds']:,.0f} s, {speed}, {memory}, "
        f"on {device['name']} ({device['driver']})"
    )
