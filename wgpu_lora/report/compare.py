"""What is different between runs, and which came out best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wgpu_lora.report.facts import defaults
from wgpu_lora.report.runs import Run

ABSENT = "not recorded"
DIGESTS, DIGEST = "SHA-256", 12  # what tells them, and characters that tell two apart
Rows = list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Comparison:
    """differing, alike: (label, the value of every run)."""

    differing: Rows
    alike: Rows


def compare(runs: Sequence[Run]) -> Comparison:
    """Options and what else runs are of: what differs between them, or, of one run, from the defaults."""
    usual = defaults()
    found = Comparison([], [])
    for label, row in _rows(runs, lambda run: run.settings):
        same = row[0] == usual.get(label) if len(runs) == 1 else len(set(row)) == 1
        (found.alike if same else found.differing).append((label, row))
    for label, row in _rows(runs, lambda run: run.record) if len(runs) > 1 else []:
        if len(set(row)) == 1:
            found.alike.append((label, row))
        else:
            found.differing.append((label, [value[:DIGEST] if DIGESTS in label else value for value in row]))
    return found


def _rows(runs: Sequence[Run], of: Callable[[Run], dict[str, str]]) -> Rows:
    labels = dict.fromkeys(label for run in runs for label in of(run))
    return [(label, [of(run).get(label, ABSENT) for run in runs]) for label in labels]


def verdict(runs: Sequence[Run]) -> str:
    """Which run's last held-out loss is the lowest, or why that cannot be said; empty of one run."""
    if len(runs) < 2:
        return ""
    measured = [(run.held_out[1], run.name, run.held_out[0]) for run in runs if run.held_out]
    if len({digest for _, _, digest in measured}) > 1:
        return "The held-out losses are of different data, so they cannot be compared."
    if len(measured) < 2:
        return "" if measured else "No run has a held-out loss (--eval-data), which is what one would compare."
    loss, name, _ = min(measured)
    return f"The lowest held-out loss at the end is {loss:.4f}, of {name}."
