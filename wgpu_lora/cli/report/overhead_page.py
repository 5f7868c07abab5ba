"""A self-contained HTML page about the cost of protected training: measured rows beside the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wgpu_lora.cli.report.line_chart import Series, line_chart
from wgpu_lora.cli.report.page import PAGE, TEMPLATES, render
from wgpu_lora.files.atomic import replace_file
from wgpu_lora.files.json_files import read_json
from wgpu_lora.names.spelling import flag
from wgpu_lora.protect.overhead_results import LIMIT, ORDERS, PUBLISHED, Row, interpretation, read_rows

# Heading -> the field of a row, and its format.
COLUMNS = {
    "row": ("label", "{}"),
    "model": ("model", "{}"),
    "device": ("gpuModel", "{}"),
    "order": ("order", "{}"),
    "target": ("targetSec", "{:,g} s"),
    "raw steps": ("rawSteps", "{:,}"),
    "raw time": ("rawElapsedSec", "{:,.2f} s"),
    "protected steps": ("protectedSteps", "{:,}"),
    "protected time": ("protectedElapsedSec", "{:,.2f} s"),
    "protecting": ("protectionSec", "{:,.2f} s"),
    "overhead": ("overheadPct", "{:+.2f}%"),
    "clean": ("cleanModelArtifact", "{}"),
}


def write_overheads(rows: Sequence[Row], output: Path) -> Path:
    """Write report.html into `output` and return its path.

    Raises:
        UserError: it cannot be written.
    """
    replace_file(output / PAGE, render_overheads(rows).encode("utf-8", "replace"), flag("output"))
    return output / PAGE


def render_overheads(rows: Sequence[Row]) -> str:
    """The page of measured rows."""
    published, source = read_rows(PUBLISHED), read_json(PUBLISHED)
    groups = {f"measured, {order}": [row for row in rows if row.get("order") == order] for order in ORDERS}
    groups["published, other software and devices"] = published
    lines = [
        Series(name, [(row["targetSec"], row["overheadPct"]) for row in group], colour, "points", marked=True)
        for colour, (name, group) in enumerate(groups.items())
        if group
    ]
    return render(
        TEMPLATES / "overhead.html.j2",
        title="Overhead of protected training",
        texts=interpretation(rows),
        names=[line.name for line in lines],
        chart=line_chart(lines, "target in seconds", "overhead in %", log=True),
        limit=f"{LIMIT:g}",
        measured=_table(rows),
        published=_table(published),
        **{name: source[name] for name in ("notes", "source", "date")},
    )


def _table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells."""
    cells = [
        ["unknown" if row.get(field) is None else form.format(row[field]) for field, form in COLUMNS.values()]
        for row in rows
    ]
    return list(COLUMNS), cells
