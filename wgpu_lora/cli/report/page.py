"""Self-contained HTML pages: no scripts, nothing fetched, light and dark mode, readable on phones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from wgpu_lora.cli.report.finished_runs import ADVICE, SPEEDS, Run
from wgpu_lora.cli.report.run_charts import axes_of, kernels, lengths_differ, memory, memory_bars, plots
from wgpu_lora.files.atomic import replace_file
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import duration, join_words
from wgpu_lora.train.memory import format_bytes
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.run_outcome import achievements, first_and_last
from wgpu_lora.train.run.stop_reasons import OUTCOMES, STOP_TEXT

PAGE = "report.html"


def write_report(runs: Sequence[Run], output: Path) -> Path:
    """Writes report.html into `output`; returns its path. If it is interrupted, nothing is left behind.

    Raises:
        UserError: `output` cannot be written.
    """
    page = render_report(runs).encode("utf-8", "replace")  # a path in it may not be text
    replace_file(output / PAGE, page, flag("output"))
    return output / PAGE


def render_report(runs: Sequence[Run]) -> str:
    differing, alike = compare(runs)
    groups = memory(runs)
    return render(
        TEMPLATES / "page.html.j2",
        title=f"Report of {runs[0].name}" if len(runs) == 1 else f"Report of {len(runs)} runs",
        runs=runs,
        differing=[(label, *values) for label, values in differing],
        alike=[(label, values[0]) for label, values in alike],
        losses=table(runs, losses),
        costs=table(runs, costs),
        record=record,
        verdict=best_run_sentence(runs),
        axes=axes_of(runs),
        log=lengths_differ(runs),
        plots=plots(runs),
        memory=list(groups),
        memory_rows=[(group, *(f"{size:,}" for size in sizes)) for group, sizes in groups.items()],
        memory_bars=memory_bars(runs),
        kernels=kernels(runs),
        advice=ADVICE,
    )


def table(runs: Sequence[Run], of: Callable[[Run], Facts]) -> tuple[list[str], list[list[str]]]:
    """The head, and a row for each run; some have more facts than others."""
    result = [of(run) for run in runs]
    names = dict.fromkeys(name for facts in sorted(result, key=len, reverse=True) for name in facts)
    return ["run", *names], [
        [run.name, *(facts.get(name, number(None)) for name in names)] for run, facts in zip(runs, result, strict=True)
    ]


TEMPLATES = Path(__file__).parent / "templates"


def render(template: Path, **values: Any) -> str:
    """Render a template that extends base.html.j2; all values are escaped."""
    import jinja2

    loader = jinja2.FileSystemLoader([template.parent, TEMPLATES])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template.name).render(**values)


# -- facts of a run for tables, by their labels; what differs between runs; and a Markdown line ------------------------

OWN = ("output", "resume", "overwrite", "run_log", "report_to")  # options that do not affect what is trained
ABSENT = "not recorded"
DIGESTS, DIGEST = "SHA-256", 12  # how they are labelled, and how many characters of them are shown
NONE = "none"
HELD_OUT = "held-out data, SHA-256"
Facts = dict[str, str]
Rows = list[tuple[str, list[str]]]


def number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def losses(run: Run) -> Facts:
    state, reason = run.record.state, run.record.stop_reason
    outcome = OUTCOMES.get(reason, reason)
    best, at = state.best_eval_loss, f", step {state.best_step:,}"
    by_loss = {
        "training loss, last": number(state.last_loss),
        **({} if (before := state.unrounded_eval_loss) is None else {"held-out loss, before rounding": number(before)}),
        "held-out loss, before": number(state.first_eval_loss),
        "held-out loss, last": number(state.trained_eval_loss),
        "held-out loss, best": number(best) + ("" if best is None else at),
    }
    return {
        **({} if first_and_last(run.log, "reward") else by_loss),
        **({"achieved": ", ".join(facts)} if (facts := achievements(run.log)) else {}),
        "steps": f"{state.step:,} of {state.total_steps:,}",
        **({"warnings": " ".join(run.record.warnings)} if run.record.warnings else {}),
        "ended": f"{outcome} ({STOP_TEXT.get(reason, reason).partition(';')[0]})" if outcome == "failed" else outcome,
    }


def costs(run: Run) -> Facts:
    state, device, speeds = run.record.state, run.record.environment.device, run.speeds()
    return {
        "time": duration(state.seconds, 1),
        "trained tokens": f"{state.tokens:,}",
        "trained parameters": f"{run.record.trainable_parameters:,}",
        "peak device memory": format_bytes(run.record.memory.peak),
        **{f"{kind} tokens/s": f"{speeds[kind]:,.0f}" if kind in speeds else "not logged" for kind in SPEEDS},
        "device": f"{device.name}, {device.backend}",
    }


def origin(run: Run) -> Facts:
    """The inputs of a run besides its options; digests distinguish files of the same name."""
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
    """The identity of a run and its adapter."""
    peak = f"{run.record.memory.peak:,} bytes"
    return {**origin(run), "adapter, SHA-256": run.record.adapter_sha256, "peak device memory": peak}


def settings(run: Run) -> Facts:
    """A run's options, named as on the command line."""
    return _flags(run.record.options.as_dict() | {"model": run.record.options.model or "demo"})


def defaults(run: Run) -> Facts:
    """The default options of a run with its objective."""
    return _flags(asdict(TrainingArguments()) | {"learning_rate": replace(run.record.options, learning_rate=None).rate})


def _flags(options: dict[str, Any]) -> Facts:
    return {f"--{name.replace('_', '-')}": _value_text(options[name]) for name in sorted(options) if name not in OWN}


def _value_text(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def compare(runs: Sequence[Run]) -> tuple[Rows, Rows]:
    """Options and everything else that runs depend on, as (label, the value of every run): first those that differ
    between the runs or, for a single run, from the defaults; then the others."""
    tables = [settings(run) | (origin(run) if runs[1:] else {}) for run in runs]
    defaults_of_run, differing, alike = defaults(runs[0]), Rows(), Rows()
    for label in dict.fromkeys(label for table in tables for label in table):
        values = [table.get(label, ABSENT) for table in tables]
        if len({*values} | ({defaults_of_run.get(label)} if len(runs) == 1 else set())) == 1:
            alike.append((label, values))
        else:
            differing.append((label, [value[:DIGEST] if DIGESTS in label else value for value in values]))
    return differing, alike


def best_run_sentence(runs: Sequence[Run]) -> str:
    """Which run's last held-out loss is the lowest, or why that cannot be said; empty for a single run."""
    if len(runs) < 2:
        return ""
    heldout = [(run.record.eval_loss, run.name, run) for run in runs if run.record.eval_loss is not None]
    if len({origin(run)[HELD_OUT] for *_, run in heldout}) > 1:
        return "The held-out losses are of different data, so they cannot be compared."
    if len({run.record.options.objective for *_, run in heldout}) > 1:
        return "The held-out losses are of different objectives, so they cannot be compared."
    if len(heldout) < 2:
        return "" if heldout else f"No run has a held-out loss ({flag('eval_data')}) to compare."
    lowest = min(loss for loss, *_ in heldout)
    best = [name for loss, name, _ in heldout if loss == lowest]
    return (
        f"{join_words(best)} {'has' if len(best) == 1 else 'have'} the lowest held-out loss at the end, {lowest:.4f}."
    )


def summary(run: Run) -> str:
    """A Markdown line for a run log."""
    state, options, device = run.record.state, run.record.options, run.record.environment.device
    result, cost = losses(run), costs(run)
    parts = [f"loss {number(state.last_loss)}"]
    if state.trained_eval_loss is not None:
        losses_by_name = {"{} before": state.first_eval_loss, "best {}": state.best_eval_loss}
        details = ", ".join(text.format(number(loss)) for text, loss in losses_by_name.items() if loss is not None)
        parts.append(f"held-out {number(state.trained_eval_loss)}" + (f" ({details})" if details else ""))
    speeds = ", ".join(f"{value:,.0f} {kind}" for kind, value in run.speeds().items())
    return (
        f"- **{run.name}**: {options.model or 'demo'}, {options.trains()}, "
        f"{result['steps']} steps ({result['ended']}), {', '.join(parts)}, {cost['time']}, "
        f"{f'{speeds} tokens/s' if speeds else 'speed not logged'}, {cost['peak device memory']} of device memory, "
        f"on {device.name}, {device.driver}"
    )
