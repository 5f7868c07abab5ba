"""Two result files side by side, with a verdict for each brick that knows how much the timings vary by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from wgpu_lora.bench.results import NOISY, Header, Result

SAME, FASTER, SLOWER = "same", "faster", "slower"
NOISE = 2.0  # coefficients of variation that a ratio must be away from 1


@dataclass(frozen=True)
class Comparison:
    """A brick's case in both files: seconds, new over old, and what that means."""

    label: str
    old: float
    new: float
    ratio: float
    verdict: str


def compare(old: list[Result], new: list[Result]) -> list[Comparison]:
    """Of every case that both have, in the new file's order."""
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
    """What makes two files hard to compare: other devices, drivers or shapes, and cases that only one has."""
    found = []
    (old_header, old_results), (new_header, new_results) = old, new
    for what, a, b in _facts(old_header, new_header):
        if a != b:
            found.append(f"{what}: {a} before, {b} now")
    before, now = ({r.label for r in results} for results in (old_results, new_results))
    for where, only in (("old", before - now), ("new", now - before)):
        if only:
            found.append(f"only in the {where} file: {', '.join(sorted(only))}")
    return found


def _facts(old: Header, new: Header) -> list[tuple[str, object, object]]:
    devices = (old.get("device", {}), new.get("device", {}))
    keys = ("name", "driver", "backend", "subgroup_size")
    facts = [(key.replace("_", " "), devices[0].get(key), devices[1].get(key)) for key in keys]
    options = (old.get("options", {}), new.get("options", {}))
    names = dict.fromkeys([*options[0], *options[1]])
    return facts + [(name.replace("_", " "), options[0].get(name), options[1].get(name)) for name in names]
