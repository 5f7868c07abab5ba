"""The names of tensors, and the tensors of other parts of the model, that a written model keeps of its source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.files.json_files import read_json
from wgpu_lora.formats.gguf.gguf_header import read_header
from wgpu_lora.formats.safetensors_checkpoint import Checkpoint, PackedCheckpoint, parts_of
from wgpu_lora.formats.safetensors_header import read_bytes
from wgpu_lora.formats.safetensors_writer import TensorSpec
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.models.loaded_model import LoadedModel, declare_decoder
from wgpu_lora.models.model_files import config_fields, read_config
from wgpu_lora.weights.base import WeightSource
from wgpu_lora.weights.base_formats import packed_form


class DecodedCheckpoint(WeightSource):
    """A checkpoint whose packed matrices are read as float32, decoded on the host one at a time."""

    def __init__(self, checkpoint: PackedCheckpoint):
        checkpoint.check_digests()
        self.source = checkpoint
        self._last: tuple[str, np.ndarray] | None = None  # matrices are read in pieces

    def names(self) -> list[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        packed = self.source.packed(name)
        return packed.shape if packed else self.source.shape(name)

    def dtype(self, name: str) -> str:
        return "F32" if self.source.packed(name) else self.source.dtype(name)

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        values = self._values(name)
        return self.source.read_raw(name, row_start, row_stop) if values is None else values[row_start:row_stop]

    def read_f32(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        values = self._values(name)
        return self.source.read_f32(name, row_start, row_stop) if values is None else values[row_start:row_stop]

    def digest(self) -> str:
        return self.source.digest()

    def _values(self, name: str) -> np.ndarray | None:
        if self._last and self._last[0] == name:
            return self._last[1]
        packed = self.source.packed(name)
        if packed is None:
            return None
        self._last = name, packed_form(packed.format).decode(packed)
        return self._last[1]


def decoded(model: LoadedModel, base_dtype: str) -> LoadedModel:
    """A model whose linear layers are stored in a base format, to be quantised in another one while it is loaded."""
    assert isinstance(model.checkpoint, PackedCheckpoint)
    config, source = replace(model.config, packed=None), DecodedCheckpoint(model.checkpoint)
    decoder = declare_decoder(config, source, base_dtype, model.device)
    return replace(model, config=config, checkpoint=source, decoder=decoder, weights_loaded=False)


class SourceDirectory:
    """The directory that a model was read from. A GGUF file has no names of its own and no other parts.

    Tensors of other parts, such as a vision tower, are copied unchanged, so that the result is a whole model.
    """

    def __init__(self, source: WeightSource):
        result = source.source if isinstance(source, DecodedCheckpoint) else source
        self._checkpoint = result if isinstance(result, Checkpoint) else None

    def stored_name(self, name: str) -> str:
        """How the source names a tensor of the model."""
        return self._checkpoint.stored_name(name) if self._checkpoint else name

    def specs(self) -> dict[str, TensorSpec]:
        """The tensors of other parts, by their names in files."""
        entries = self._checkpoint.skipped_tensors if self._checkpoint else {}
        return {name: TensorSpec(entry.dtype, entry.shape) for name, entry in entries.items()}

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        assert self._checkpoint
        yield read_bytes(self._checkpoint.skipped_tensors[name])

    def modules(self) -> tuple[str, ...]:
        """Beginnings of the paths of their modules, as transformers may name them."""
        return tuple(f"{prefix}{part}" for part in parts_of(self.specs()) for prefix in ("", "model."))


def update_config(directory: Path, dtype: str | None = None, **changes: Any) -> None:
    """Changes fields of config.json: None removes one. dtype: of the weights, also in the text part if it has one."""
    path = directory / "config.json"
    config = read_json(path) | changes
    whole = {name: value for name, value in config.items() if value is not None or name not in changes}
    text = whole.get("text_config")
    if dtype:
        whole["dtype" if "dtype" in whole else "torch_dtype"] = dtype
        if isinstance(text, dict):
            whole["text_config"] = text | {name: dtype for name in ("dtype", "torch_dtype") if name in text}
    if isinstance(text, dict) and "quantization_config" in text and "quantization_config" in changes:
        whole["text_config"].pop("quantization_config")
    path.write_text(json.dumps(whole, indent=2) + "\n")


def write_companions(path: Path, tokenizer: Tokenizer | None, directory: Path) -> None:
    """Writes config.json and the tokenizer's files, if there is a tokenizer.

    Raises:
        UserError: config.json cannot express the GGUF file's metadata.
    """
    header = read_header(path)
    config = read_config(header)
    fields = {**config_fields(header), **config.gguf().config_fields(config, path)}
    if config.TRANSFORMERS:
        fields["architectures"] = [config.TRANSFORMERS]
    files = {"config.json": json.dumps(fields, indent=2) + "\n"} | (tokenizer.files() if tokenizer else {})
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content, encoding="utf-8")
