"""A finished run as its directory has it: run.json, log.jsonl, and profile.json where somebody made one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.bench.profile import described
from wgpu_lora.errors import UserError
from wgpu_lora.report.facts import ROWS, model_of, summary
from wgpu_lora.train.output import LOG, RUN, read_log

PROFILE = "profile.json"
ADVICE = f"'wgpu-lora profile --run RUN --json > RUN/{PROFILE}'"
DRAWN = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second")
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
Series = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Run:
    """What is known of a run, read and checked.

    Attributes:
        rows: what the page's table says, by its lines' labels.
        series: by what was logged, steps and values; empty where it was not.
        memory: bytes by group.
        kernels: seconds of a step by kernel; None where they were not measured, or on something else than this run's.
        profiled: what `kernels` were measured on, or why they are not drawn; empty where there is no profile.
    """

    name: str
    rows: dict[str, str]
    summary: str
    series: dict[str, Series]
    memory: dict[str, float]
    kernels: dict[str, float] | None
    profiled: str


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """The runs of these directories, named apart.

    Raises:
        UserError: a directory is given twice, holds no finished run, or its files are damaged.
    """
    places = [directory.resolve() for directory in directories]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise UserError(f"The run in {directories[number]} is given twice: leave one of them out.")
    names = [place.name for place in places]
    apart = names if len(set(names)) == len(names) else [str(directory) for directory in directories]
    shown = [name.encode("utf-8", "replace").decode() for name in apart]  # Linux has names that are not text
    return [_read(name, directory) for name, directory in zip(shown, directories, strict=True)]


def _read(name: str, directory: Path) -> Run:
    path = directory / RUN
    if not path.is_file():
        raise UserError(f"{directory} holds no finished run (there is no {RUN}): give a run's --output directory.")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        log = read_log(directory / LOG) if (directory / LOG).is_file() else []
        series = {key: _series(log, key) for key in DRAWN}
        rows = {label: value(facts) for label, value in ROWS.items()}
        memory = {str(group): float(count) for group, count in facts["memory"]["groups"].items()}
        kernels, profiled = _profile(name, directory / PROFILE, facts)
        line = summary(name, facts, series["tokens_per_second"][1])
        return Run(name, rows, line, series, memory, kernels, profiled)
    except KeyError as error:
        raise UserError(f"The run in {directory} cannot be read: {error} is missing.") from error
    except DAMAGE as error:
        raise UserError(f"The run in {directory} cannot be read ({type(error).__name__}: {error}).") from error


def _series(log: Sequence[Mapping[str, Any]], key: str) -> Series:
    lines = [line for line in log if line.get(key) is not None]
    return [int(line["step"]) for line in lines], [float(line[key]) for line in lines]


def _profile(name: str, path: Path, facts: Mapping[str, Any]) -> tuple[dict[str, float] | None, str]:
    """A profile's seconds by kernel, where it is of the run's model and base weights, and what is to be said of it."""
    if not path.is_file():
        return None, ""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
        work, seconds = profile.get("work", {}), dict[str, float]()
        for kernel in profile["kernels"]:  # one has several lines where shapes are kept apart
            seconds[str(kernel["kernel"])] = seconds.get(str(kernel["kernel"]), 0.0) + float(kernel["seconds"])
        if "base_digest" not in work:
            why = f"its {PROFILE} does not say what it is of; {ADVICE} makes one that does"
            return None, f"{name}: not drawn, since {why}."
        device = "{name} ({driver})".format(**profile["device"])
        activations, trained = work["compute_dtype"], facts["options"]["compute_dtype"]
        unlike = "" if activations == trained else f" (the run's in {trained})"
        what = f"{described(work)}, activations in {activations}{unlike}, on {device}"
        same = work["base_digest"] == facts["base_digest"] and work["base_dtype"] == facts["options"]["base_dtype"]
        if same and work["whole"]:
            return seconds, f"{name}: {what}"
    except DAMAGE as error:
        why = f"its {PROFILE} cannot be read ({type(error).__name__}: {error}); {ADVICE} makes it anew"
        return None, f"{name}: not drawn, since {why}."
    own = f"{model_of(facts)} in {facts['options']['base_dtype']}"
    return None, f"{name}: not drawn, since its {PROFILE} is of {what}, the run of {own}; {ADVICE} makes its own."
