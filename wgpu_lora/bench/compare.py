"""Comparison of two result files, with a verdict for each brick that allows for the variation of its timings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wgpu_lora.bench.results import NOISY, Header, Result

SAME, FASTER, SLOWER = "same", "faster", "slower"
NOISE = 2.0  # coefficients of variation by which a ratio must differ from 1


@dataclass(frozen=True)
class Comparison:
    """A case of a brick in both files: seconds, new over old, and the verdict."""

    label: str
    old: float
    new: float
    ratio: float
    verdict: str


def compare(old: list[Result], new: list[Result]) -> list[Comparison]:
    """Compare every case that both have, in the new file's order."""
    before = {r.label: r for r in old}
    return [_compare(before[r.label], r) for r in new if r.label in before]


def _compare(old: Result, new: Result) -> Comparison:
    ratio = new.seconds / old.seconds
    overlap = old.p20 <= new.p80 and new.p20 <= old.p80
    noise = overlap or abs(ratio - 1) < NOISE * max(old.cv, new.cv)
    same = NOISY if old.noisy or new.noisy else SAME  # a difference may hide in what varies too much
    verdict = same if noise else FASTER if ratio < 1 else SLOWER
    return Comparison(new.label, old.seconds, new.seconds, ratio, verdict)


def warnings(old: tuple[Header, list[Result]], new: tuple[Header, list[Result]]) -> list[str]:
    """Differences that make two files hard to compare: device, driver, options, and cases that only one of them has."""
    (before, old_results), (now, new_results) = (_facts(old[0]), old[1]), (_facts(new[0]), new[1])
    found = [
        f"{name.replace('_', ' ')}: {before.get(name)} before, {now.get(name)} now"
        for name in before | now
        if before.get(name) != now.get(name)
    ]
    labels = {"old": {r.label for r in old_results}, "new": {r.label for r in new_results}}
    for where, other in (("old", "new"), ("new", "old")):
        if only := labels[where] - labels[other]:
            found.append(f"only in the {where} file: {', '.join(sorted(only))}")
    return found


def _facts(header: Header) -> dict[str, Any]:
    device = {key: header["device"].get(key) for key in ("name", "driver", "backend", "subgroup_size")}
    return device | header["options"]
