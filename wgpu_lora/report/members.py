"""Which directories hold the runs that a directory stands for: its own, or those of a pipeline's adapters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from wgpu_lora.errors import UserError
from wgpu_lora.train.output import LOG
from wgpu_lora.train.pipeline_state import MEMBER, home_of, read_pipeline_state
from wgpu_lora.train.records import PIPELINE, RUN
from wgpu_lora.train.state import STATE
from wgpu_lora.train.tasks import tasks_of_request

FEW = 3  # directories that are named


def directories_of(directory: Path) -> list[Path]:
    """The directory itself where it holds a run; its adapters' where it is a pipeline's own and holds none.

    Raises:
        UserError: the pipeline's record is damaged, or an adapter of it has no finished run where it was.
    """
    if (directory / RUN).is_file() or not (directory / PIPELINE).is_file():
        return [directory]
    found = [Path(task.checkpoint) for task in tasks_of_request(read_pipeline_state(directory).request, directory)]
    for place in found:
        if not (place / RUN).is_file():
            raise UserError(
                f"The pipeline in {directory} trained an adapter in {place}, where there is no {RUN} now: give the "
                "adapters' own directories."
            )
    return found


def nothing_in(directory: Path) -> UserError:
    """What to say of a directory without a finished run, by what is there."""
    if not directory.is_dir():
        return UserError(f"There is no directory {directory}: give a run's --output.")
    if (directory / STATE).is_file() and (directory / "adapter_config.json").is_file():
        return UserError(f"{directory} holds a checkpoint, and no finished run: give the --output of its run.")
    if any((directory / name).is_file() for name in (LOG, MEMBER, STATE)):
        return UserError(
            f"{directory} holds no finished run (there is no {RUN}): wait until it has ended, or, if it was killed, "
            "continue it with --resume."
        )
    inside = [str(path.parent) for path in sorted(directory.glob(f"*/{RUN}"))[:FEW]]
    advice = f", such as {' '.join(inside)}" if inside else ""
    return UserError(f"{directory} holds no finished run (there is no {RUN}): give a run's --output{advice}.")


def left_out(directories: Sequence[Path]) -> list[Path]:
    """Runs that were trained together with those given, and are not given themselves."""
    places, found = {directory.resolve() for directory in directories}, dict[Path, Path]()
    for directory in directories:
        with suppress(UserError):  # what is moved or damaged is not missed here
            home = home_of(directory)
            tasks = tasks_of_request(read_pipeline_state(home).request, home) if home else []
            found |= {Path(task.checkpoint).resolve(): Path(task.checkpoint) for task in tasks}
    return [path for place, path in found.items() if place not in places and (path / RUN).is_file()]
