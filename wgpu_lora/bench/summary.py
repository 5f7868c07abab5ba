"""The results of a training benchmark in sentences and tables, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wgpu_lora.train.memory import readable
from wgpu_lora.words import counted

Record = Mapping[str, Any]
NAMES = {
    "seconds": "seconds, after the warm-up",
    "samples_per_second": "samples/s",
    "tokens_per_second": "processed tokens/s",
    "trained_tokens_per_second": "trained tokens/s",
    "final_loss": "final loss",
}


def work_name(header: Record) -> str:
    """recipe demo; shape tiny-qwen3, 8 layers"""
    work = header["work"]
    recipe, shape = work.get("recipe"), work.get("shape")
    return f"recipe {recipe}" if recipe else f"shape {shape}, {counted(work['layers'], 'layer')}"


def steps_text(summary: Record) -> str:
    """20 of 20 steps done, no errors"""
    steps, count = summary["steps"], len(summary["errors"])
    errors = counted(count, "error") if count else "no errors"
    return f"{steps['done']:,} of {counted(steps['planned'], 'step')} done, {errors}"


def memory_text(memory: Record) -> str:
    """1.2 GiB planned at peak, 5.0% of the device's 24.0 GiB; 19.2 GiB of the budget are left"""
    text = f"{readable(memory['peak'])} planned at peak"
    if memory["share"] is not None:
        share = f"{memory['share']:.1%}" if memory["share"] >= 0.001 else "less than 0.1%"
        text += f", {share} of the device's {readable(memory['total'])}"
    if memory["headroom"] is not None:
        left = memory["headroom"]
        text += f"; {readable(left)} of the budget are left" if left >= 0 else f"; {readable(-left)} over the budget"
    return text


def gate_text(gate: Record) -> str:
    """the runs vary by 0.42%, within the limit of 1%"""
    within = "within" if gate["passed"] else "more than"
    return f"the runs vary by {gate['spread']:.2%}, {within} the limit of {100 * gate['limit']:.3g}%"


def written(found: Record) -> str:
    """The summary of what `run_training` returned."""
    header, summary = found["header"], found["summary"]
    device, commit = header["device"], header["commit"]
    facts = {
        "Device": f"{device['name']}, {device['driver']}, {device['backend']}",
        "Time": header["time"],
        "Versions": ", ".join(f"{name} {version}" for name, version in header["versions"].items()),
        "Commit": "unknown" if not commit else commit["id"][:12] + (" with changes" if commit["modified"] else ""),
        "Steps": f"{counted(summary['runs'], 'run')}: {steps_text(summary)}; not counted: {header['excluded']}",
        "Memory": memory_text(summary["memory"]),
    }
    if summary["gate"]:
        facts["Spread"] = gate_text(summary["gate"])
    lines = [f"# Training benchmark: {work_name(header)}", ""]
    lines += [f"- {name}: {text}" for name, text in facts.items()]
    lines += [f"- Error: {error}" for error in summary["errors"]]
    columns = ("", "median", "min", "max", "spread")
    lines += _table(columns, [_spread(NAMES[name], spread) for name, spread in summary["spread"].items()])
    if found["projections"]:
        columns = ("model", "grade", "memory", "samples/s", "seconds")
        lines += _table(columns, [_projection(record) for record in found["projections"]])
        lines += ["", "Memory is each model's plan; time is projected from counted operations at the measured rate."]
    return "\n".join(lines) + "\n"


def _spread(name: str, spread: Record) -> Sequence[str]:
    cv = "" if spread["cv"] is None else f"{spread['cv']:.2%}"
    return name, *("" if spread[key] is None else f"{spread[key]:.6g}" for key in ("median", "min", "max")), cv


def _projection(record: Record) -> Sequence[str]:
    peak = "not possible" if record["peak_planned"] is None else readable(record["peak_planned"])
    speed, seconds = f"{record['samples_per_second']:.3g}", f"{record['seconds']:,.0f}"
    return record["shape"], record["grade"], peak, speed, seconds


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in columns[1:])]
    return ["", *(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))]
