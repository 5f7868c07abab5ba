"""A self-contained HTML page about the rows of a run: `data stats`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.cli.report.line_chart import Chart, Series, line_chart
from wgpu_lora.cli.report.page import TEMPLATES, render
from wgpu_lora.cli.report.run_charts import Bar
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import check_file, replace_file
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import duration, percent
from wgpu_lora.train.data_statistics import Choice, RowStatistics
from wgpu_lora.train.memory import format_bytes
from wgpu_lora.train.time_estimate import Projection

BINS = 60  # of the histogram
_BEGIN = b"<!doctype html>"


def check_page(page: Path) -> None:
    """Raise UserError if a path is something other than a page, which is not replaced."""
    check_file(page, flag("page"))
    if not page.exists():
        return
    with page.open("rb") as file:
        if file.read(len(_BEGIN)).lower() not in (_BEGIN, b""):
            raise UserError(f"{page} exists already and is not a page: give {flag('page')} another name.")


def write_page(
    page: Path,
    statistics: RowStatistics,
    projection: Projection | None = None,
    price: float | None = None,
    larger: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the page; returns its path.

    Raises:
        UserError: it cannot be written, or would replace something else.
    """
    check_page(page)
    replace_file(page, render_page(statistics, projection, price, larger).encode("utf-8", "replace"), flag("page"))
    return page


def render_page(
    statistics: RowStatistics, projection: Projection | None, price: float | None, larger: Sequence[Mapping[str, Any]]
) -> str:
    tokens = {name: f"{length:,}" for name, length in statistics.quantiles.items()}
    maximum = max(statistics.formats.values(), default=1)
    facts = {
        "rows": f"{len(statistics.lengths):,}",
        "held-out rows": f"{statistics.heldout:,}",
        "tokens": f"{statistics.total:,}",
        "trained tokens": f"{statistics.trained:,} ({percent(statistics.trained / statistics.total)})",
    }
    if statistics.packing_savings is not None:
        facts["positions that packing saves"] = (
            f"{statistics.packing_savings:.1%}, at {statistics.own.max_length:,} tokens a row"
        )
    return render(
        TEMPLATES / "data.html.j2",
        title=f"Rows of {Path(statistics.name).name}",
        summary=statistics.summary,
        facts_of=facts,
        quantiles=(list(tokens), [list(tokens.values())]),
        lengths=_lengths(statistics),
        formats=[Bar.of(name, f"{n:,}", maximum, [(n, 0, f"{name}: {n:,}")]) for name, n in statistics.formats.items()],
        choices=[_row(choice) for choice in statistics.others],
        own=_row(statistics.own),
        steps=_by_length(statistics.others, "steps", lambda choice: float(choice.steps)),
        padding=_by_length(statistics.others, "per cent", lambda choice: 100 * choice.padding),
        cut=_cut(statistics),
        stages=_stages(projection),
        costs=_costs(projection, price),
        timed=projection.timed if projection else 0,
        larger=[_larger(record, price) for record in larger],
    )


def _lengths(statistics: RowStatistics) -> Chart:
    """A histogram of the lengths."""
    counts, edges = np.histogram(statistics.lengths, bins=BINS, range=(0, max(1, statistics.lengths.max())))
    bars = zip(counts, edges[:-1], edges[1:], strict=True)
    points = [(float(x), float(y)) for n, a, b in bars for x, y in ((a, 0), (a, n), (b, n), (b, 0))]
    return line_chart([Series("rows", points)], "tokens of a row", "rows")


def _cut(statistics: RowStatistics) -> Chart:
    """The share of the rows that each maximum length cuts."""
    sorted_lengths, count = np.sort(statistics.lengths), len(statistics.lengths)
    lengths = np.unique(np.linspace(0, sorted_lengths[-1], 200).astype(int))
    points = [
        (float(n), 100 * float(count - np.searchsorted(sorted_lengths, n, side="right")) / count) for n in lengths
    ]
    return line_chart([Series("rows cut", points)], "--max-length", "per cent of the rows")


def _by_length(choices: Sequence[Choice], label: str, value: Any) -> Chart:
    lines = [
        Series(name, [(float(c.max_length), value(c)) for c in choices if c.packing is packing], colour, marked=True)
        for colour, (name, packing) in enumerate({"packed": True, "not packed": False}.items())
    ]
    return line_chart([line for line in lines if line.points], "--max-length", label)


def _row(choice: Choice) -> list[str]:
    return [
        f"{choice.max_length:,}",
        "yes" if choice.packing else "no",
        f"{choice.cut:,}",
        f"{choice.lost:,}",
        f"{choice.trained:.1%}",
        f"{choice.padding:.1%}",
        f"{choice.steps:,}",
    ]


def _stages(projection: Projection | None) -> list[Bar]:
    if projection is None:
        return []
    maximum = max(projection.stages.values())
    return [
        Bar.of(stage, duration(seconds, 1), maximum, [(seconds, number, f"{stage}: {seconds:,.2f} s")])
        for number, (stage, seconds) in enumerate(projection.stages.items())
    ]


def _costs(projection: Projection | None, price: float | None) -> dict[str, str]:
    if projection is None:
        return {}
    cost = {} if price is None else {"cost": f"{projection.cost(price):,.4g}, at {price:g} an hour"}
    return {"whole run": duration(projection.total, 1), **cost}


def _larger(record: Mapping[str, Any], price: float | None) -> list[str]:
    peak = record["peak_planned"]
    cost = "not asked" if price is None else f"{record['seconds'] / 3600 * price:,.4g}"
    fits = {True: "yes", False: "no", None: "not known"}[record["fits"]]
    return [
        str(record["shape"]),
        duration(record["seconds"], 1),
        cost,
        "not possible" if peak is None else format_bytes(peak),
        fits,
    ]
