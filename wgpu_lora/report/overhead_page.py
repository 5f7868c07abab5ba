"""A self-contained HTML page about the cost of protected training: measured rows beside the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wgpu_lora.atomic import replace_file
from wgpu_lora.bench.overhead import ORDERS, Row
from wgpu_lora.bench.overhead_results import LIMIT, Results, interpretation, published
from wgpu_lora.names.spelling import flag
from wgpu_lora.report.comparison_tables import DIGEST
from wgpu_lora.report.html_page import TEMPLATES, render
from wgpu_lora.report.line_chart import Chart, Line, line_chart
from wgpu_lora.report.page import PAGE

HEAD = ["row", "model", "device", "order", "target", "raw steps", "protected steps", "overhead", "clean"]
SEGMENTS = [
    "row", "segment", "elapsed", "outside the clock", "protecting", "steps", "step budget", "ended", "final loss",
    "adapter",
]  # fmt: skip
UNKNOWN = "not known"


def write_overheads(found: Sequence[Results], output: Path) -> Path:
    """Writes report.html into `output`; returns its path. Raises UserError if it cannot be written."""
    replace_file(output / PAGE, render_overheads(found).encode("utf-8", "replace"), flag("output"))
    return output / PAGE


def render_overheads(found: Sequence[Results]) -> str:
    rows, others = [row for results in found for row in results.rows], published()
    lines = _lines(rows, others.rows)
    return render(
        TEMPLATES / "overhead.html.j2",
        title="Overhead of protected training",
        said=interpretation(rows),
        names=[line.name for line in lines],
        chart=_chart(lines),
        limit=LIMIT,
        measured=(HEAD, [_cells(row) for row in rows]),
        segments=(SEGMENTS, [_segment(row, side) for row in rows for side in ("raw", "protected")]),
        settings=_settings(rows),
        published=(HEAD, [_cells(row) for row in others.rows]),
        notes=others.notes,
        source=others.source,
        dates=f"{others.date}",
    )


def _lines(rows: Sequence[Row], others: Sequence[Row]) -> list[Line]:
    """The dots of each order, and those of the published rows."""
    groups = {f"measured, {order}": [row for row in rows if row.order == order] for order in ORDERS}
    groups["published, other software and devices"] = list(others)
    return [
        Line(name, [(row.target_sec or 0.0, row.overhead_pct) for row in group], colour, "points", marked=True)
        for colour, (name, group) in enumerate(groups.items())
        if group
    ]


def _chart(lines: Sequence[Line]) -> Chart:
    return line_chart(lines, "target in seconds", "overhead in %", log=True)


def _cells(row: Row) -> list[str]:
    clean = {True: "yes", False: "no", None: UNKNOWN}[row.clean_model_artifact]
    return [
        row.label,
        row.model,
        row.gpu_model or UNKNOWN,
        row.order or UNKNOWN,
        _known(row.target_sec, "{:,g} s"),
        _known(row.raw_steps, "{:,}"),
        _known(row.protected_steps, "{:,}"),
        f"{row.overhead_pct:+.2f}%",
        clean,
    ]


def _segment(row: Row, side: str) -> list[str]:
    def of(name: str) -> Any:
        return getattr(row, f"{side}_{name}")

    return [
        f"{row.label}, {row.order}",
        side,
        _known(of("elapsed_sec"), "{:,.2f} s"),
        _known(of("outside_sec"), "{:,.1f} s"),
        _known(row.protection_sec, "{:,.2f} s") if side == "protected" else "",
        _known(of("steps"), "{:,}"),
        _known(of("step_budget"), "{:,}"),
        of("stop_reason") or UNKNOWN,
        _known(of("final_loss"), "{:.4f}"),
        (of("adapter_sha256") or UNKNOWN)[:DIGEST],
    ]


def _settings(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What rows have in common: the settings of the training, and the sizes of model and adapter."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        sizes = {"parameters": row.total_params, "trained parameters": row.trainable_adapter_params}
        for name, value in (sizes | (row.stability_settings or {})).items():
            found.setdefault(name, {})[_known(value, "{:,}" if isinstance(value, int) else "{}")] = None
    return [(name, ", ".join(values)) for name, values in found.items()]


def _known(value: Any, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)
