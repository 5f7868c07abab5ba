"""One self-contained HTML page of some runs, and the PNG files that are in it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import jinja2

from wgpu_lora.errors import UserError
from wgpu_lora.formats.atomic import write_bytes_atomic
from wgpu_lora.report.facts import ROWS
from wgpu_lora.report.plots import PLOTS, draw
from wgpu_lora.report.runs import ADVICE, PROFILE, Run

PAGE = "report.html"
ABSENT = dict.fromkeys(PLOTS, "Not logged.") | {"kernels": f"Not measured: no run has a {PROFILE} of its own."}


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
        rows = [(label, [run.rows[label] for run in runs]) for label in ROWS]
        notes = {"kernels": [run.profiled or f"{run.name}: not measured; {ADVICE} does." for run in runs]}
        title = f"Report of {', '.join(run.name for run in runs)}"
        page = environment.from_string(template).render(
            title=title, runs=runs, rows=rows, images=images, absent=ABSENT, notes=notes
        )
        write_bytes_atomic(output / PAGE, page.encode())
    except OSError as error:
        raise UserError(f"The report cannot be written to {output}: {error.strerror}.") from None
    return output / PAGE
