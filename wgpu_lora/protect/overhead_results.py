"""Rows of `bench --protected` and their result files, in the fields of published ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import read_json
from wgpu_lora.files.typed_json import typed
from wgpu_lora.names.text import count_noun

SCHEMA = "wgpu-lora-overhead/1"
PUBLISHED = Path(__file__).with_name("published_overhead.json")
ORDERS = ("raw-first", "protected-first")
VERIFIED, ZEROIZED, TARGET = "verified", "zeroized", "target seconds"  # of a clean row
LIMIT = 1.0  # per cent, of the median over all rows
ROUNDED = 0.006  # published overheads have two digits
TEXTS: dict[str, Any] = {
    "title": "Overhead of protected LoRA training",
    "sameAllocation": True,
    "methodology": {
        "comparison": "A raw and a protected segment run one after the other, in one process and on one device, on the "
        "same rows with the same recipe and tilings. The broker is another process on the same machine.",
        "durationControl": "Each segment has a target in seconds, from the begin of its first step to the end of its "
        "last, with checkpoints, their sealing, the evidence log, and reports to the broker.",
        "notCounted": "Loading, tuning, attestation, key release and decryption before the first step; the final files "
        "and the cleanup after the last. rawOutsideSec and protectedOutsideSec are their seconds.",
        "overhead": "overheadPct = 100 (1 - (protectedSteps / protectedElapsedSec) / (rawSteps / rawElapsedSec))",
        "protectedLifecycle": [
            *("attestation", "gated key release", "protected LoRA training", "evidence recording", "zeroized cleanup")
        ],
    },
    "redactionPolicy": "Rows hold figures, options of the recipe and digests of adapters. They hold no text of any row "
    "of data, no token ids, no keys and no paths.",
}
Row = dict[str, Any]
FIGURES = ("rawSteps", "rawElapsedSec", "protectedSteps", "protectedElapsedSec", "protectionSec")
ShownRow = TypedDict(  # the fields that reports show
    "ShownRow",
    {
        **dict.fromkeys(("label", "model"), str),  # type: ignore[misc]
        **dict.fromkeys(("targetSec", "overheadPct"), float),
        **dict.fromkeys(("gpuModel", "order"), NotRequired[str | None]),
        **dict.fromkeys(FIGURES, NotRequired[float | None]),
        "notClean": NotRequired[list[str]],
    },
)


def overhead_pct(row: Mapping[str, Any]) -> float:
    """100 (1 - (protected steps / protected seconds) / (raw steps / raw seconds)). Raises ValueError: a segment has no
    step, or no time."""
    steps, seconds = ([row[f"{side}{field}"] for side in ("raw", "protected")] for field in ("Steps", "ElapsedSec"))
    if min(steps) < 1 or not all(0 < value < math.inf for value in seconds):
        raise ValueError("a segment has no step or no time")
    return float(100 * (1 - (steps[1] / seconds[1]) / (steps[0] / seconds[0])))


def make_row(figures: Mapping[str, Any]) -> Row:
    """A row from the figures of its segments: with the overhead, and what keeps it from being clean. Raises UserError:
    a segment has no step."""
    try:
        row = {**figures, "overheadPct": overhead_pct(figures)}
    except ValueError:
        step_count = min(figures["rawSteps"], figures["protectedSteps"])
        raise UserError(
            f"A segment had {count_noun(step_count, 'step')}, too few to compare: give a longer --target-seconds."
        ) from None
    digests, steps = ({row[f"{side}{name}"] for side in ("raw", "protected")} for name in ("AdapterSha256", "Steps"))
    defects = {
        f"the attestation is {row['attestation']}": row["attestation"] != VERIFIED,
        f"the state of the protected run is {row['runtimeState']}": row["runtimeState"] != ZEROIZED,
        # The same steps on the same rows give the same bits.
        "both adapters are the same after different numbers of steps": len(digests) == 1 and len(steps) == 2,
    }
    for side in ("raw", "protected"):
        loss, stop_reason, digest = (row[f"{side}{name}"] for name in ("FinalLoss", "StopReason", "AdapterSha256"))
        defects |= {
            f"the final loss of the {side} segment is not finite": loss is None or not math.isfinite(loss),
            f"the {side} segment ended before its target ({stop_reason})": stop_reason != TARGET,
            f"the adapter of the {side} segment is the initial one": digest == row["initialAdapterSha256"],
        }
    row["notClean"] = [reason for reason, applies in defects.items() if applies]
    return {**row, "cleanModelArtifact": not row["notClean"]}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows, median, min, max and spread (max - min) of the overhead in per cent, of all rows and by order."""
    by_order = {order: [row["overheadPct"] for row in rows if row.get("order") == order] for order in ORDERS}
    overheads = [row["overheadPct"] for row in rows]
    return {
        "all": _spread(overheads),
        "byOrder": {order: _spread(values) for order, values in by_order.items() if values},
        "spreadOfRepeats": max((max(v) - min(v) for v in by_order.values() if len(v) > 1), default=None),
        "negative": sum(value < 0 for value in overheads),
        "clean": sum(bool(row.get("cleanModelArtifact")) for row in rows),
        "limitPct": LIMIT,
        "withinLimit": statistics.median(overheads) <= LIMIT,
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    minimum, maximum = min(values), max(values)
    return {
        "rows": len(values),
        "median": statistics.median(values),
        "min": minimum,
        "max": maximum,
        "spread": maximum - minimum,
    }


def interpretation(rows: Sequence[Row]) -> list[str]:
    """Sentences on what the rows show, for each training that they measure."""
    labels = dict.fromkeys(row["label"] for row in rows)
    if len(labels) > 1:
        groups = {label: [row for row in rows if row["label"] == label] for label in labels}
        return [f"{label}: {text}" for label, group in groups.items() for text in interpretation(group)]
    summary = summarize(rows)
    total, repeats, orders = summary["all"], summary["spreadOfRepeats"], summary["byOrder"]
    medians = "; ".join(f"{order} {figures['median']:+.2f}%" for order, figures in orders.items())
    texts = [
        f"Overhead over {count_noun(total['rows'], 'row')}: median {total['median']:+.2f}%, from {total['min']:+.2f}% "
        f"to {total['max']:+.2f}% (medians by order: {medians or 'unknown'}); "
        f"{'within' if summary['withinLimit'] else 'above'} the limit of {LIMIT:g}%."
    ]
    if below := summary["negative"]:
        texts.append(
            f"{count_noun(below, 'row')} below zero: that is noise, since protection does not make training faster."
        )
    if repeats is not None:
        word = "more" if abs(total["median"]) > repeats else "no more"
        texts.append(
            f"Repeats in the same order differ by up to {repeats:.2f} points; the median overhead is {word} than that."
        )
    elif orders:
        texts.append("There is one row per order, so the spread of repeats is unknown.")
    if len(orders) == 1:
        texts.append("Only one order was run, so what the second segment gains or loses by its place is unknown.")
    defects = [(row, why) for row in rows for why in row.get("notClean", ())]
    return [*texts, *(f"{row['label']}, {row['order']}: not clean, because {why}." for row, why in defects)]


def result_file(rows: Sequence[Row], scope: str, environment: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a result file.

    Args:
        scope: what was measured, in a sentence. environment: `brick_results.header`.
    """
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        "scope": scope,
        **TEXTS,
        "results": list(rows),
        "summary": summarize(rows),
        "interpretation": interpretation(rows),
        "environment": {name: value for name, value in environment.items() if name != "command"},  # which has paths
    }


def read_rows(path: Path) -> list[Row]:
    """The rows of a result file.

    Raises:
        UserError: it is no result file, is damaged, or a row's overhead does not follow from its figures.
    """
    content = read_json(path)
    if content.get("schema") != SCHEMA and content != read_json(PUBLISHED):
        has = f"the schema {content.get('schema')!r:.60}" if "schema" in content else "no schema"
        raise UserError(f"{path} has {has}, expected '{SCHEMA}': give a file that 'wgpu-lora bench --protected' wrote.")
    try:
        for row in content["results"]:
            typed(ShownRow, row, "a row")
            if "rawSteps" in row and abs(overhead_pct(row) - row["overheadPct"]) > ROUNDED:
                raise ValueError(
                    f"'overheadPct' is {row['overheadPct']:g}, but its figures give {overhead_pct(row):.2f}"
                )
        interpretation(content["results"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): measure it again.") from None
    return list(content["results"])
