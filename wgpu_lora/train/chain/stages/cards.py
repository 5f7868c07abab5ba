"""The card of a repository that holds several adapters and GGUF files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.formats.model_cards import CARD, card_of_repository
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS
from wgpu_lora.train.chain.stage import Stage, Watch


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
