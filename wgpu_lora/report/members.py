"""The directories of the runs that a directory stands for: itself, or those of a pipeline's adapters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from wgpu_lora.errors import UserError
from wgpu_lora.names.naming import flag, setting
from wgpu_lora.train.output import LOG
from wgpu_lora.train.pipeline_state import MEMBER, home_of, read_pipeline_state
from wgpu_lora.train.records import PIPELINE, RUN
from wgpu_lora.train.state import STATE
from wgpu_lora.train.tasks import tasks_of_request

FEW = 3  # directories that are named


def directories_of(directory: Path) -> list[Path]:
    """The directory itself; if it is a pipeline's and has no run of its own, those of its adapters.

    Raises:
        UserError: the pipeline's record is damaged, or the finished run of an adapter is missing.
    """
    if (directory / RUN).is_file() or not (directory / PIPELINE).is_file():
        return [directory]
    found = _members(directory)
    if missing := next((place for place in found if not (place / RUN).is_file()), None):
        raise UserError(
            f"The pipeline in {directory} trained an adapter in {missing}, where there is no {RUN} now: give the "
            "adapters' own directories."
        )
    return found


def _members(pipeline: Path) -> list[Path]:
    """The adapters' directories. Raises UserError if the pipeline's record is damaged."""
    return [Path(task.checkpoint) for task in tasks_of_request(read_pipeline_state(pipeline).request, pipeline)]


def nothing_in(directory: Path) -> UserError:
    """The error for a directory without a finished run, by what is in it."""
    if not directory.is_dir():
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


def left_out(directories: Sequence[Path]) -> list[Path]:
    """Runs that were trained together with the given ones, but are not given themselves."""
    places, found = {directory.resolve() for directory in directories}, dict[Path, Path]()
    for directory in directories:
        with suppress(UserError):  # a pipeline that was moved or damaged is ignored
            home = home_of(directory)
            found |= {path.resolve(): path for path in (_members(home) if home else [])}
    return [path for place, path in found.items() if place not in places and (path / RUN).is_file()]
