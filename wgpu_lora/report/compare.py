"""What is different between runs, and which came out best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from wgpu_lora.report.facts import HELD_OUT, Facts, defaults, origin, settings
from wgpu_lora.report.runs import Run

ABSENT = "not recorded"
DIGESTS, DIGEST = "SHA-256", 12  # what tells them, and characters that tell two apart
Rows = list[tuple[str, list[str]]]


class Comparison(NamedTuple):
    """differing, alike: (label, the value of every run)."""

    differing: Rows
    alike: Rows


def compare(runs: Sequence[Run]) -> Comparison:
    """Options and what else runs are of: what differs between them, or, of one run, from the defaults."""
    if len(runs) == 1:
        usual, found = defaults(), _rows(runs, settings)
        same = [row[0] == usual.get(label) for label, row in found]
    else:
        found = _rows(runs, settings) + _rows(runs, origin)
        same = [len(set(row)) == 1 for _, row in found]
    differing = [row for row, is_same in zip(found, same, strict=True) if not is_same]
    return Comparison(
        [(label, [value[:DIGEST] if DIGESTS in label else value for value in row]) for label, row in differing],
        [row for row, is_same in zip(found, same, strict=True) if is_same],
    )


def _rows(runs: Sequence[Run], of: Callable[[Run], Facts]) -> Rows:
    tables = [of(run) for run in runs]
    labels = dict.fromkeys(label for table in tables for label in table)
    return [(label, [table.get(label, ABSENT) for table in tables]) for label in labels]


def verdict(runs: Sequence[Run]) -> str:
    """Which run's last held-out loss is the lowest, or why that cannot be said; empty of one run."""
    if len(runs) < 2:
        return ""
    measured = [(run.record.eval_loss, run.name, origin(run)[HELD_OUT]) for run in runs]
    known = [(loss, name, digest) for loss, name, digest in measured if loss is not None]
    if len({digest for *_, digest in known}) > 1:
        return "The held-out losses are of different data, so they cannot be compared."
    if len(known) < 2:
        return "" if known else "No run has a held-out loss (--eval-data), which is what one would compare."
    loss, name, _ = min(known)
    return f"The lowest held-out loss at the end is {loss:.4f}, of {name}."
