"""The interface of a stage, and how its options are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from wgpu_lora.events import SILENT, Events
from wgpu_lora.files.typed_json import read_as
from wgpu_lora.formats.hub import cached_model, hub_id, resolve_model

if TYPE_CHECKING:
    from wgpu_lora.train.job import Job


class EndedEarlyError(Exception):
    """A stage was interrupted or failed, and has said why. code: the exit code."""

    def __init__(self, code: int):
        super().__init__(f"exit code {code}")
        self.code = code


@dataclass(frozen=True)
class Stage:
    """A stage of a chain. Its fields are its options, under the names in the file.

    resumes: whether `run` continues what an interrupted one has left; outdated outputs are then kept under another
        name, since they took long. Others write to a new directory, which replaces the outdated one.
    """

    resumes: ClassVar[bool] = False

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Self:
        """A stage with these options. Raises UserError, which begins with `where`."""
        return read_as(cls, values, where)

    @classmethod
    def option_names(cls) -> list[str]:
        """The names of its options."""
        return [field.name for field in fields(cls)]

    def fingerprint(self) -> dict[str, Any]:
        """The inputs besides files, as JSON values."""
        return asdict(self)

    def files(self, download: bool) -> Iterator[Path]:
        """The files that it reads, and directories whose files it reads; they need not exist yet.

        Args:
            download: whether a model of the hub may be downloaded.

        Raises:
            UserError: they cannot be found.
        """
        yield from ()

    def run(self, output: Path, watch: Watch, resuming: bool) -> None:
        """Write the results into `output`, which does not exist unless `resuming`.

        Raises:
            UserError: an input is missing or wrong.
            EndedEarlyError: it was interrupted, or failed.
        """
        raise NotImplementedError

    def outputs(self, output: Path) -> Iterator[Path]:
        """The files that must stay as they are."""
        yield from (path for path in sorted(output.rglob("*")) if path.is_file() and not path.name.startswith("."))


def model_files(model: str, download: bool) -> Iterator[Path]:
    """The files of a model; of a hub id, those in the cache unless it may be downloaded. Raises UserError."""
    result = resolve_model(model) if download or not hub_id(model) else cached_model(model) or Path(model)
    if not result.exists():
        yield result
        return
    if result.is_file():
        yield result
        return
    yield from (
        path
        for path in sorted(result.iterdir())
        if path.suffix in (".safetensors", ".json", ".jinja", ".model", ".txt")
    )


class Watch:
    """How a stage's progress is shown; override what is of interest."""

    def reading(self, text: str, done: float, total: float | None) -> None:
        """Progress in megabytes."""

    def tensors(self, text: str, total: int) -> AbstractContextManager[Events]:
        """A listener to tensors that are written."""
        return nullcontext(SILENT)

    def training(self, job: Job[Any]) -> AbstractContextManager[Events]:
        return nullcontext(SILENT)

    def trained(self, record: Any) -> None:
        """The record of a run that has ended."""

    def note_line(self, label: str, text: str) -> None:
        """A line about the stage's result."""


class ChainWatch(Watch):
    """Also hears which stages run."""

    def stage(self, number: int, name: str, kind: str, why: str, seconds: float | None) -> None:
        """A stage begins. seconds: that it and those after it took when they last ran, None if not all are known."""

    def skipped(self, number: int, name: str, kind: str) -> None:
        """A stage is up to date."""

    def finished(self, name: str, output: Path, seconds: float) -> None:
        """A stage has run."""
