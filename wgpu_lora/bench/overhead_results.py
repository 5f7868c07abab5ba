"""Result files of `bench --protected`, and the published rows that reports show beside them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wgpu_lora.bench.overhead import ORDERS, Row
from wgpu_lora.bounded import read_json
from wgpu_lora.errors import UserError
from wgpu_lora.typed_json import typed
from wgpu_lora.words import count_noun

NAME, VERSION = "wgpu-lora-overhead", "1"
SCHEMA = f"{NAME}/{VERSION}"
PUBLISHED = Path(__file__).with_name("published_overhead.json")
LIMIT = 1.0  # per cent, of the median over all rows

LIFECYCLE = ("attestation", "gated key release", "protected LoRA training", "evidence recording", "zeroized cleanup")
METHODOLOGY: dict[str, Any] = {
    "comparison": "A raw and a protected segment run one after the other, in one process and on one device, on the "
    "same rows with the same recipe and the same tilings. The broker is another process on the same machine. "
    "Protections of the host last as long as the protected segment.",
    "durationControl": "Each segment has a target in seconds. Elapsed seconds count from the begin of its first step "
    "to the end of its last, with everything that lies between: checkpoints, their sealing, the evidence log, and "
    "reports to the broker.",
    "notCounted": "Loading, tuning, attestation, key release and decryption before the first step; the final files and "
    "the cleanup after the last. rawOutsideSec and protectedOutsideSec are their seconds.",
    "overhead": "overheadPct = 100 (1 - (protectedSteps / protectedElapsedSec) / (rawSteps / rawElapsedSec))",
    "protectedLifecycle": list(LIFECYCLE),
}
REDACTION = (
    "Rows hold figures, options of the recipe and digests of adapters. They hold no text of any row of data, no token "
    "ids, no keys and no paths."
)


@dataclass(frozen=True)
class Results:
    """A result file. summary: of `summarised`; None in published files."""

    title: str
    date: str
    rows: list[Row]
    summary: dict[str, Any] | None = None
    source: str | None = None
    notes: list[str] = field(default_factory=list)


def summarised(rows: Sequence[Row]) -> dict[str, Any]:
    """The overheads of all rows and of those in each order: rows, median, min, max and spread (max - min), in per cent.

    spread is the largest one between repeats in the same order, None if there are none; negative says how many rows are
    below zero, clean how many are clean; limit, and whether the median of all is within it.
    """
    by_order = {order: [row.overhead_pct for row in rows if row.order == order] for order in ORDERS}
    every = [row.overhead_pct for row in rows]
    repeated = [max(values) - min(values) for values in by_order.values() if len(values) > 1]
    return {
        "all": _spread(every),
        "byOrder": {order: _spread(values) for order, values in by_order.items() if values},
        "spreadOfRepeats": max(repeated, default=None),
        "negative": sum(value < 0 for value in every),
        "clean": sum(bool(row.clean_model_artifact) for row in rows),
        "limitPct": LIMIT,
        "withinLimit": statistics.median(every) <= LIMIT,
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    low, high = min(values), max(values)
    return {"rows": len(values), "median": statistics.median(values), "min": low, "max": high, "spread": high - low}


def interpretation(rows: Sequence[Row]) -> list[str]:
    """What the rows say, and what they do not: sentences, for each training that they are of."""
    labels = dict.fromkeys(row.label for row in rows)
    if len(labels) > 1:
        groups = {label: [row for row in rows if row.label == label] for label in labels}
        return [f"{label}: {text}" for label, group in groups.items() for text in interpretation(group)]
    summary = summarised(rows)
    every, repeats = summary["all"], summary["spreadOfRepeats"]
    orders = "; ".join(f"{order} {found['median']:+.2f}%" for order, found in summary["byOrder"].items())
    within = "within" if summary["withinLimit"] else "above"
    said = [
        f"Overhead over {count_noun(every['rows'], 'row')}: median {every['median']:+.2f}%, from {every['min']:+.2f}% "
        "to "
        f"{every['max']:+.2f}% (medians by order: {orders}); {within} the limit of {LIMIT:g}%."
    ]
    if summary["negative"]:
        said.append(
            f"{count_noun(summary['negative'], 'row')} below zero: that is noise, since protection does not make "
            "training "
            "faster."
        )
    if repeats is None:
        said.append("There is one row per order, so the spread of repeats is not known.")
    else:
        more = abs(every["median"]) <= repeats
        said.append(
            f"Repeats in the same order differ by up to {repeats:.2f} points, "
            + ("so the overhead cannot be told from noise." if more else "less than the median overhead.")
        )
    timed = [row for row in rows if row.protection_sec is not None and row.protected_elapsed_sec]
    if timed:
        most = max(100 * (row.protection_sec or 0.0) / (row.protected_elapsed_sec or 1.0) for row in timed)
        said.append(
            f"Timed where it is done, the protection (sealing, log lines, reports) took at most {most:.2f}% of a "
            "protected segment; the rest of a row's difference is not from this work."
        )
    if len(summary["byOrder"]) < len(ORDERS):
        said.append("Only one order was run: what the second segment gains or loses by its place is not known.")
    for row in rows:
        said += [f"{row.label}, {row.order}: not clean, because {reason}." for reason in row.not_clean]
    return said


def result_file(rows: Sequence[Row], scope: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a result file.

    Args:
        scope: what was measured, in a sentence. environment: device, driver, versions and commit (`results.header`).
    """
    return {
        "schema": SCHEMA,
        "title": "Overhead of protected LoRA training",
        "date": datetime.now(UTC).date().isoformat(),
        "scope": scope,
        "sameAllocation": True,
        "methodology": METHODOLOGY,
        "results": [row.to_json() for row in rows],
        "summary": summarised(rows),
        "interpretation": interpretation(rows),
        "redactionPolicy": REDACTION,
        "environment": {name: value for name, value in environment.items() if name != "command"},  # which has paths
    }


def is_result_file(path: Path) -> bool:
    """Whether a path is to be read by `read_results`, and not a run's directory."""
    return path.is_file() and path.suffix == ".json"


def read_results(path: Path) -> Results:
    """A result file. Raises UserError if it is none, is damaged, or a row's overhead is not that of its figures."""
    content = read_json(path)
    if path != PUBLISHED and content.get("schema") != SCHEMA:
        has = f"the schema {content.get('schema')!r:.60}" if "schema" in content else "no schema"
        raise UserError(f"{path} has {has}, expected '{SCHEMA}': give a file that 'wgpu-lora bench --protected' wrote.")
    try:
        rows = [Row.of_json(row) for row in typed(list[Any], content.get("results"), "'results'")]
        if not rows:
            raise ValueError("it has no rows")
        title, date = (typed(str, content.get(name), f"'{name}'") for name in ("title", "date"))
        notes = typed(list[str], content.get("interpretation", content.get("notes", [])), "'interpretation'")
        summary = None if path == PUBLISHED else summarised(rows)
        return Results(title, date, rows, summary, typed(str | None, content.get("source"), "'source'"), notes)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): measure it again.") from None


def published() -> Results:
    """The published rows, of other software on other devices."""
    return read_results(PUBLISHED)
