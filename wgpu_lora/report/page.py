"""One self-contained HTML page of some runs, and the PNG files that are in it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from wgpu_lora.errors import UserError
from wgpu_lora.formats.atomic import write_bytes_atomic
from wgpu_lora.report.plots import PLOTS, draw
from wgpu_lora.report.runs import PROFILE, Run

PAGE = "report.html"
NOT_MEASURED = {
    "kernels": f"Not measured: no run has a {PROFILE}; 'wgpu-lora profile --json > RUN/{PROFILE}' makes it."
}


def _loss(name: str) -> Callable[[Run], str]:
    def text(run: Run) -> str:
        value = run.facts["state"][name]
        return "not measured" if value is None else f"{value:.4f}"

    return text


def _option(*names: str) -> Callable[[Run], str]:
    return lambda run: ", ".join(str(run.facts["options"][name]) for name in names)


ROWS: dict[str, Callable[[Run], Any]] = {
    "base model": lambda run: run.facts["options"]["model"] or "demo",
    "base weights, arithmetic": _option("base_dtype", "compute_dtype"),
    "rank, alpha, dropout": _option("lora_r", "lora_alpha", "lora_dropout"),
    "targets": _option("target_modules"),
    "trained parameters": lambda run: f"{run.facts['trainable_parameters']:,}",
    "data": lambda run: f"{Path(run.facts['data']['path']).name}: {run.facts['data']['summary']}",
    "learning rate": _option("learning_rate", "lr_scheduler_type"),
    "steps": lambda run: f"{run.facts['state']['step']:,} of {run.facts['state']['total_steps']:,}",
    "ended because of": lambda run: run.facts["stop_reason"],
    "seconds": lambda run: f"{run.facts['state']['seconds']:,.1f}",
    "trained tokens": lambda run: f"{run.facts['state']['tokens']:,}",
    "final loss": _loss("last_loss"),
    "held-out loss": _loss("last_eval_loss"),
    "best held-out loss": _loss("best_eval_loss"),
    "peak device memory": lambda run: f"{run.facts['memory']['peak']:,} bytes",
    "device": lambda run: "{name}, {driver}, {backend}".format(**run.facts["environment"]["device"]),
    "versions": lambda run: ", ".join(f"{k} {v}" for k, v in run.facts["environment"]["versions"].items()),
    "adapter SHA-256": lambda run: run.facts["adapter_sha256"],
}


def write_report(runs: Sequence[Run], output: Path) -> Path:
    """Writes report.html and its pictures into `output`; returns the page's path.

    Raises:
        UserError: matplotlib is not installed, or `output` cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        pictures = draw(runs, output)
        images = {n: base64.b64encode(pictures[n].read_bytes()).decode() if n in pictures else "" for n in PLOTS}
        template = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
        environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
        absent = dict.fromkeys(PLOTS, "Not logged.") | NOT_MEASURED
        rows = [(label, [value(run) for run in runs]) for label, value in ROWS.items()]
        title = f"Report of {', '.join(run.name for run in runs)}"
        page = environment.from_string(template).render(title=title, runs=runs, rows=rows, images=images, absent=absent)
        write_bytes_atomic(output / PAGE, page.encode())
    except OSError as error:
        raise UserError(f"The report cannot be written to {output}: {error.strerror}.") from None
    return output / PAGE
