"""Self-contained HTML pages: no scripts, nothing fetched, light and dark mode, readable on phones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wgpu_lora.cli.report import comparison_tables
from wgpu_lora.cli.report.finished_runs import ADVICE, Run
from wgpu_lora.cli.report.run_charts import axes_of, kernels, lengths_differ, memory, memory_bars, plots
from wgpu_lora.files.atomic import replace_file
from wgpu_lora.names.spelling import flag

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
    differing, alike = comparison_tables.compare(runs)
    groups = memory(runs)
    return render(
        TEMPLATES / "page.html.j2",
        title=f"Report of {runs[0].name}" if len(runs) == 1 else f"Report of {len(runs)} runs",
        runs=runs,
        differing=[(label, *values) for label, values in differing],
        alike=[(label, values[0]) for label, values in alike],
        losses=table(runs, comparison_tables.losses),
        costs=table(runs, comparison_tables.costs),
        record=comparison_tables.record,
        verdict=comparison_tables.best_run_sentence(runs),
        axes=axes_of(runs),
        log=lengths_differ(runs),
        plots=plots(runs),
        memory=list(groups),
        memory_rows=[(group, *(f"{size:,}" for size in sizes)) for group, sizes in groups.items()],
        memory_bars=memory_bars(runs),
        kernels=kernels(runs),
        advice=ADVICE,
    )


def table(runs: Sequence[Run], of: Callable[[Run], comparison_tables.Facts]) -> tuple[list[str], list[list[str]]]:
    """The head, and a row for each run; some have more facts than others."""
    result = [of(run) for run in runs]
    names = dict.fromkeys(name for facts in sorted(result, key=len, reverse=True) for name in facts)
    return ["run", *names], [
        [run.name, *(facts.get(name, comparison_tables.number(None)) for name in names)]
        for run, facts in zip(runs, result, strict=True)
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
