"""Preparation of rows, as by `data prepare`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from wgpu_lora.data.curation import Preparation, prepare_files
from wgpu_lora.data.curation.curate import CurationProgress
from wgpu_lora.data.curation.curation_files import find_inputs
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.chain.stage import Stage, Watch


@dataclass(frozen=True)
class Prepare(Stage):
    """inputs: files, folders, glob patterns and datasets. The others are the options of `Preparation`."""

    inputs: list[str]
    exclude: list[str] = field(default_factory=list)
    preferences_from: list[str] = field(default_factory=list)
    duplicates: str = Preparation.duplicates
    near_duplicates: float | None = None
    strip_system: bool = False
    drop_thinking: bool = False
    enable_thinking: bool | None = None
    max_characters: int | None = None
    validation_split: float | None = None
    group_by: str | None = None
    seed: int = Preparation.seed

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Self:
        stage = super().of(values, where)
        try:
            stage.preparation()
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return stage

    def preparation(self) -> Preparation:
        return Preparation(**{name: value for name, value in asdict(self).items() if name != "inputs"})

    def files(self, download: bool) -> Iterator[Path]:
        result = find_inputs(self.inputs, Path("unwritten"), self.exclude)
        yield from (path for path in result.paths if path is not None)

    def run(self, output: Path, watch: Watch, resuming: bool) -> None:
        def tell(progress: CurationProgress) -> None:
            text = f"preparing {progress.name}: {count_noun(progress.rows, 'row')}"
            watch.reading(text, progress.bytes / 1e6, progress.total / 1e6 or None)

        self._check_place(output.parent.resolve())
        report = prepare_files(self.inputs, output, self.preparation(), tell)
        for name, facts in report["files"].items():
            watch.note_line("rows", f"{facts['rows']:,} in {name}")

    def _check_place(self, chain: Path) -> None:
        """Raise UserError if the inputs include the chain's own files, which change with every run."""
        result = find_inputs(self.inputs, Path("unwritten"), self.exclude)
        around = [name for name in self.inputs if Path(name).is_dir() and chain.is_relative_to(Path(name).resolve())]
        within = [str(path) for path in result.paths if path is not None and path.resolve().parent == chain]
        if around or within:
            raise UserError(
                f"{(around or within)[0]} includes what the chain writes: choose another --output, or name the files."
            )
