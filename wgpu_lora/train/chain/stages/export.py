"""What a base and an adapter become: a standalone model, and GGUF files of several types in one pass over the base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from wgpu_lora.errors import UserError
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS
from wgpu_lora.models.export.adapter_merge import DTYPES, merge_adapter
from wgpu_lora.models.export.gguf_export import FILE_TYPES, export_models
from wgpu_lora.models.model_files import config_of
from wgpu_lora.names.text import join_words
from wgpu_lora.train.chain.stage import Stage, Watch, model_files


@dataclass(frozen=True)
class Merge(Stage):
    adapter: str
    model: str = "demo"
    dtype: str = "bf16"

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Self:
        stage = super().of(values, where)
        if stage.dtype not in DTYPES:
            raise UserError(f"{where}: 'dtype' is {stage.dtype!r:.40}, but must be one of {join_words([*DTYPES])}.")
        return stage

    def files(self, download: bool) -> Iterator[Path]:
        yield from model_files(self.model, download)
        yield from (Path(self.adapter, file) for file in (WEIGHTS, CONFIG))

    def run(self, output: Path, watch: Watch, resuming: bool) -> None:
        base = resolve_model(self.model)
        with watch.tensors("merging", len(config_of(base).parameter_shapes())) as events:
            merge_adapter(base, Path(self.adapter), output, self.dtype, name=self.model, events=events)


@dataclass(frozen=True)
class Gguf(Stage):
    """stem: of the files' names; a file is STEM-TYPE.gguf."""

    model: str = "demo"
    adapter: str | None = None
    quantize: list[str] = field(default_factory=lambda: ["f16"])
    stem: str = "model"

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Self:
        stage = super().of(values, where)
        for kind in stage.quantize:
            if kind not in FILE_TYPES:
                raise UserError(
                    f"{where}: '{kind:.40}' is no type of GGUF files: choose of {join_words([*FILE_TYPES])}."
                )
        if not stage.quantize or len(set(stage.quantize)) < len(stage.quantize):
            raise UserError(f"{where}: 'quantize' must list types, each once.")
        if not stage.stem or Path(stage.stem).name != stage.stem or stage.stem.startswith("."):
            raise UserError(f"{where}: 'stem' is {stage.stem!r:.60}, but must be the beginning of a file's name.")
        return stage

    def files(self, download: bool) -> Iterator[Path]:
        yield from model_files(self.model, download)
        if self.adapter:
            yield from (Path(self.adapter, file) for file in (WEIGHTS, CONFIG))

    def run(self, output: Path, watch: Watch, resuming: bool) -> None:
        base = resolve_model(self.model)
        with watch.tensors("exporting", len(config_of(base).parameter_shapes())) as events:
            outputs = {kind: output / f"{self.stem}-{kind}.gguf" for kind in self.quantize}
            adapter = Path(self.adapter) if self.adapter else None
            result = export_models(base, outputs, adapter, self.stem, events)
        for kind, file in result.items():
            text = f"{file.nbytes:,} bytes, {file.bits_per_weight:.2f} bits per weight"
            watch.note_line("gguf", f"{outputs[kind].name}: {text}")
        for note in next(iter(result.values())).notes:
            watch.note_line("note", note)
