"""A standalone model from a base and an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from wgpu_lora.errors import UserError
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS
from wgpu_lora.models.export.adapter_merge import DTYPES, merge_adapter
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
