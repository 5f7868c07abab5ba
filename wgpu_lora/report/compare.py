"""What is different between runs, and which came out best."""

from __future__ import annotations

from collections.abc import Sequence

from wgpu_lora.report.facts import HELD_OUT, defaults, origin, settings
from wgpu_lora.report.runs import Run

ABSENT = "not recorded"
DIGESTS, DIGEST = "SHA-256", 12  # what tells them, and characters that tell two apart
Rows = list[tuple[str, list[str]]]


def compare(runs: Sequence[Run]) -> tuple[Rows, Rows]:
    """Options and what else runs depend on, as (label, the value of every run): those that differ between the runs or,
    for a single run, from the defaults; and those that do not."""
    tables = [settings(run) | (origin(run) if runs[1:] else {}) for run in runs]
    usual, differing, alike = defaults(), Rows(), Rows()
    for label in dict.fromkeys(label for table in tables for label in table):
        values = [table.get(label, ABSENT) for table in tables]
        if len({*values} | ({usual.get(label)} if len(runs) == 1 else set())) == 1:
            alike.append((label, values))
        else:
            differing.append((label, [value[:DIGEST] if DIGESTS in label else value for value in values]))
    return differing, alike


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
