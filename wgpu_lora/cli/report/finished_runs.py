"""A finished run as its directory has it: run.json, log.jsonl and, if there is one, profile.json."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.bench.step_profile import described
from wgpu_lora.errors import UserError
from wgpu_lora.files.locks import is_directory
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.train.adapter_tasks import tasks_of_request
from wgpu_lora.train.run.multi_adapter_state import MEMBER, home_of, read_multi_adapter_state
from wgpu_lora.train.run.records import PIPELINE, RUN, RunRecord
from wgpu_lora.train.run.run_state import STATE
from wgpu_lora.train.run.training_log import COMPLETIONS, LOG, completion_entry, read_log

PROFILE = "profile.json"
ADVICE = f"'wgpu-lora profile --run RUN --json > RUN/{PROFILE}'"
AXES = ("step", "tokens", "seconds")  # keys of a log line
MOST = 1e18  # bytes, or seconds
LONGEST = 600  # characters of a prompt or a completion
COMPLETIONS_SHOWN = 16
SPEEDS = {"trained": "tokens_per_second", "processed": "processed_tokens_per_second"}
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
Point = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """The facts of a run, read and checked.

    Attributes:
        log: the lines of its log, each with `step`, `tokens`, `seconds` and `progress` (per cent of the steps).
        kernels: seconds of a step by kernel; None if they were not measured, or on another model than the run's.
        profiled: what `kernels` were measured on, or why they are not drawn; empty if there is no profile.
        completions: the prompt, a completion, its rewards and its advantage, of the last ones that were logged.
    """

    name: str
    record: RunRecord
    log: list[dict[str, float]]
    kernels: dict[str, float] | None
    profiled: str
    completions: Sequence[Sequence[str]] = ()

    def points(self, key: str, axis: str) -> list[Point]:
        """The logged values of `key`, by another key of the log's lines."""
        return [(line[axis], line[key]) for line in self.log if key in line]

    def speeds(self) -> dict[str, float]:
        """The median logged speed for each kind of token."""
        result = {kind: [line[key] for line in self.log if key in line] for kind, key in SPEEDS.items()}
        return {kind: statistics.median(values) for kind, values in result.items() if values}


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """The runs of these directories, by unique names; a pipeline's own directory stands for those of its adapters.

    Raises:
        UserError: a directory is given twice, holds no finished run, or its files are damaged.
    """
    run_directories = [path for directory in directories for path in directories_of(directory)]
    # resolve() has an error for loops of links
    paths = [Path(os.path.realpath(directory)) for directory in run_directories]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise UserError(f"The run in {run_directories[number]} is given twice: leave one of them out.")
    names = [path.name for path in paths]
    labels = names if len(set(names)) == len(names) else [str(directory) for directory in run_directories]
    texts = [escape_unprintable(name.encode("utf-8", "replace").decode()) for name in labels]  # some names are not text
    return [_read(name, directory) for name, directory in zip(texts, run_directories, strict=True)]


def _read(name: str, directory: Path) -> Run:
    if not (directory / RUN).is_file():
        raise nothing_in(directory)
    record = RunRecord.read(directory)
    try:
        for value in (record.state.seconds, record.memory.peak, *record.memory.groups.values()):
            _amount(value)
        profile = _profile(name, directory / PROFILE, record)
        return Run(name, record, _log(directory / LOG), *profile, _completions(directory / COMPLETIONS))
    except DAMAGE as error:
        raise UserError(f"The run in {directory} cannot be read ({type(error).__name__}: {error}).") from error


def _log(path: Path) -> list[dict[str, float]]:
    """The lines by step; a line before the first step has no tokens."""
    lines = [{"tokens": 0} | line if line["step"] == 0 else line for line in (read_log(path) if path.is_file() else [])]
    points = [line for line in lines if min(line.get(axis, -1) for axis in AXES) >= 0]
    last = max((line["step"] for line in points), default=0) or 1
    return sorted(({**line, "progress": 100 * line["step"] / last} for line in points), key=lambda line: line["step"])


def _completions(path: Path) -> list[list[str]]:
    """The first of the last step that trained on some, as texts."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    entries = [entry for line in lines if (entry := completion_entry(line)) and not entry.get("heldout")]
    last = [entry for entry in entries if entry["step"] == entries[-1]["step"]]
    return [
        [
            _short_text(entry.get("prompt")),
            _short_text(entry.get("completion")),
            _numbers(entry.get("rewards")),
            _numbers(entry.get("advantage")),
        ]
        for entry in last[:COMPLETIONS_SHOWN]
    ]


def _short_text(value: Any) -> str:
    """A text, or the last of some messages, shortened."""
    text = str(value[-1].get("content") if isinstance(value, list) and value and isinstance(value[-1], dict) else value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _numbers(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_numbers(item)}" for name, item in value.items())
    return f"{value:.3g}" if isinstance(value, int | float) else "none"


def _profile(name: str, path: Path, run: RunRecord) -> tuple[dict[str, float] | None, str]:
    """A profile's seconds by kernel, if it is of the run's model and base weights, and a sentence about it."""
    if not path.is_file():
        return None, ""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
        work, seconds = profile.get("work", {}), dict[str, float]()
        for kernel in profile["kernels"]:  # one has several lines if shapes are kept apart
            seconds[str(kernel["kernel"])] = seconds.get(str(kernel["kernel"]), 0.0) + _amount(kernel["seconds"])
        if "base_digest" in work:
            device = "{name} ({driver})".format(**profile["device"])
            activations, trained = work["compute_dtype"], run.options.compute_dtype
            remark = "" if activations == trained else f" (the run's in {trained})"
            description = f"{described(work)}, activations in {activations}{remark}, on {device}"
            is_same_base = work["base_digest"] == run.base_digest and work["base_dtype"] == run.options.base_dtype
            if is_same_base and work["whole"]:
                return seconds, f"{name}: {description}"
            why = f"is of {description}, the run of {run.options.model or 'demo'} in {run.options.base_dtype}"
        else:
            why = "does not say what it is of"
    except DAMAGE as error:
        why = f"cannot be read ({type(error).__name__}: {error})"
    return None, f"{name}: not drawn, because its {PROFILE} {why}; {ADVICE} makes one for the run."


def _amount(value: Any) -> float:
    """Bytes or seconds. Raises ValueError if it cannot be that many."""
    amount = float(value)
    if not 0 <= amount <= MOST:
        raise ValueError(f"{amount} is not a valid amount")
    return amount


FEW = 3  # directories that are named


def directories_of(directory: Path) -> list[Path]:
    """The directory itself; if it is a pipeline's and has no run of its own, those of its adapters.

    Raises:
        UserError: the pipeline's record is damaged, or the finished run of an adapter is missing.
    """
    if (directory / RUN).is_file() or not (directory / PIPELINE).is_file():
        return [directory]
    result = _members(directory)
    if missing := next((path for path in result if not (path / RUN).is_file()), None):
        raise UserError(
            f"The pipeline in {directory} trained an adapter in {missing}, where there is no {RUN} now: give the "
            "adapters' own directories."
        )
    return result


def _members(pipeline: Path) -> list[Path]:
    """The adapters' directories. Raises UserError if the pipeline's record is damaged."""
    return [Path(task.checkpoint) for task in tasks_of_request(read_multi_adapter_state(pipeline).request, pipeline)]


def nothing_in(directory: Path) -> UserError:
    """The error for a directory without a finished run, by what is in it."""
    if not is_directory(directory):
        return UserError(f"There is no directory {directory}: give a run's {flag('output')}.")
    if (directory / STATE).is_file() and (directory / "adapter_config.json").is_file():
        return UserError(f"{directory} holds a checkpoint, and no finished run: give the {flag('output')} of its run.")
    if any((directory / name).is_file() for name in (LOG, MEMBER, STATE)):
        return UserError(
            f"{directory} holds no finished run (there is no {RUN}): wait until it has ended, or, if it was killed, "
            f"continue it with {setting('resume', True)}."
        )
    inside = [str(path.parent) for path in sorted(directory.glob(f"*/{RUN}"))[:FEW]]
    advice = f", such as {' '.join(inside)}" if inside else ""
    return UserError(f"{directory} holds no finished run (there is no {RUN}): give a run's {flag('output')}{advice}.")


def missing_members(directories: Sequence[Path]) -> list[Path]:
    """Runs that were trained together with the given ones, but are not given themselves."""
    paths, result = {directory.resolve() for directory in directories}, dict[Path, Path]()
    for directory in directories:
        with suppress(UserError):  # a pipeline that was moved or damaged is ignored
            home = home_of(directory)
            result |= {path.resolve(): path for path in (_members(home) if home else [])}
    return [path for resolved, path in result.items() if resolved not in paths and (path / RUN).is_file()]
