"""One upload of several adapters and files to a repository of the Hugging Face hub, or a list of what it would hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import file_digest, write_bytes_atomic
from wgpu_lora.formats.hub_upload import Upload, check_repo_name, merge_uploads, prepare
from wgpu_lora.formats.hub_upload import push as send
from wgpu_lora.formats.model_cards import CARD, card_of_repository
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS
from wgpu_lora.train.chain.stage import Stage, Watch

RESULT = "push.json"


@dataclass(frozen=True)
class Push(Stage):
    """adapters: directories that become folders of the repository; files_of: directories of GGUF files, at its root;
    card: a directory with the repository's card. private: a repository that is created."""

    repo: str
    adapters: list[str] = field(default_factory=list)
    files_of: list[str] = field(default_factory=list)
    card: str | None = None
    private: bool = True
    dry_run: bool = True

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Self:
        stage = super().of(values, where)
        try:
            check_repo_name(stage.repo)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        folders = [Path(path).name.casefold() for path in stage.adapters]
        for path, folder in zip(stage.adapters, folders, strict=True):
            if folders.count(folder) > 1:
                raise UserError(
                    f"{where}: several of 'adapters' would be the folder '{Path(path).name}': rename all but one."
                )
        if not (stage.adapters or stage.files_of):
            raise UserError(f"{where} uploads nothing: give 'adapters' or 'files_of'.")
        return stage

    def files(self, download: bool) -> Iterator[Path]:
        if self.card:
            yield Path(self.card, CARD)
        for path in (*map(Path, self.adapters), *map(Path, self.files_of)):
            yield from (file for file, _ in prepare(path).files.values()) if path.is_dir() else [path]

    def run(self, output: Path, watch: Watch, resuming: bool) -> None:
        upload = self._upload()
        files = {
            name: {"bytes": size, "sha256": file_digest(path)} for name, (path, size) in sorted(upload.files.items())
        }
        for name, facts in files.items():
            watch.note_line("file", f"{name}, {facts['bytes']:,} bytes: {upload.reasons[name]}")
        for note in upload.notes:
            watch.note_line("note", note)
        count = f"{len(files)} files, {upload.nbytes:,} bytes"
        if self.dry_run:
            address = None
            visibility = "private" if self.private else "public"
            watch.note_line("dry run", f"{count} to {self.repo} ({visibility} if created); nothing was uploaded")
        else:
            address = send(upload, self.repo, private=self.private)
            watch.note_line("uploaded", f"{count}: {address}")
        result = {"repo": self.repo, "private": self.private, "uploaded": address, "files": files}
        write_bytes_atomic(output / RESULT, (json.dumps(result, indent=1) + "\n").encode())

    def _upload(self) -> Upload:
        folders = {Path(path).name: prepare(Path(path)) for path in self.adapters}
        roots = [prepare(Path(path)) for path in self.files_of]
        return merge_uploads(folders, roots, Path(self.card, CARD) if self.card else None)


@dataclass(frozen=True)
class Cards(Stage):
    """adapters: their directories, each a folder of the repository; files: directories of GGUF files."""

    title: str
    model: str = "demo"
    adapters: list[str] = field(default_factory=list)
    files_of: list[str] = field(default_factory=list)

    def files(self, download: bool) -> Iterator[Path]:
        for adapter in self.adapters:
            yield from (Path(adapter, file) for file in (CARD, WEIGHTS, CONFIG))
        yield from map(Path, self.files_of)

    def run(self, output: Path, watch: Watch, resuming: bool) -> None:
        adapters = [Path(adapter) for adapter in self.adapters]
        files = [path for directory in self.files_of for path in sorted(Path(directory).glob("*.gguf"))]
        write_bytes_atomic(output / CARD, card_of_repository(self.title, self.model, adapters, files).encode())
