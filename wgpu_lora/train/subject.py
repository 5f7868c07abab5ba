"""The interface of what a run trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Protocol

from wgpu_lora.formats.peft import CONFIG, WEIGHTS
from wgpu_lora.train.session import Session
from wgpu_lora.train.storage import PLAIN, Storage

# The files that a checkpoint has of what is trained, by the first of them.
ADAPTER_FILES = (WEIGHTS, CONFIG)
CONSTANT_FILES = ("constants.safetensors",)


class Damaged(ValueError):
    """What is wrong with the files of a checkpoint, for a sentence about it."""


class Subject(Protocol):
    """What a run trains in its slot: where it begins, and the files that it is saved in."""

    files: ClassVar[tuple[str, ...]]  # of a checkpoint and of the finished run; the first has the parameters

    def described(self) -> tuple[str, str]:
        """A label and a text, for the summary before a run: ('adapter', 'rank 16 on all-linear')."""

    def place_initial(self, session: Session, slot: int) -> None:
        """Uploads the parameters that the run starts from. The base's weights are loaded."""

    def place_first(self, session: Session, slot: int, resumed_from: Path | None, storage: Storage = PLAIN) -> None:
        """`place_initial` of a run that may have been resumed."""

    def place(self, directory: Path, session: Session, slot: int, contents: Mapping[str, bytes] | None = None) -> None:
        """Uploads those of an intact checkpoint. Raises Damaged if they are not those of this run.

        contents: of its files by name, if they are not plain ones.
        """

    def saved(self, session: Session, slot: int) -> dict[str, bytes]:
        """The contents of `files`."""

    def last_steps(self, total: int) -> int:
        """The steps at the end of a run of `total` that differ from those before them; 0 if none do."""

    def before_step(self, session: Session, ending: bool) -> None:
        """Called before passes. ending: whether they belong to the last steps."""

    def write(self, session: Session, slot: int, directory: Path) -> None:
        """Writes to a run's directory what its result has besides `files`, which are there already."""
