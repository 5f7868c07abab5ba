"""Opens a model's files, in any supported format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wgpu_lora.data.gguf_tokenizer import read_tokenizer
from wgpu_lora.data.tokenizer import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.formats.checkpoint import Checkpoint, WeightSource
from wgpu_lora.formats.gguf.header import read_header
from wgpu_lora.formats.hub import is_gguf
from wgpu_lora.formats.packed import PackedCheckpoint
from wgpu_lora.formats.peft import CONFIG
from wgpu_lora.models.architectures import load_config
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.gguf import open_weights, read_config
from wgpu_lora.names.naming import flag

_AT_A_TIME = 1 << 22  # values that are compared


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk: checked, but without its weights read."""

    config: ModelConfig
    checkpoint: WeightSource
    tokenizer: Tokenizer | None


def read_model(path: str | Path) -> ModelFiles:
    """Opens a model: a directory in Hugging Face's format, or a GGUF file.

    Raises:
        UserError: a file is missing, damaged, hostile or unsupported.
    """
    path = Path(path)
    return _read_gguf(path) if is_gguf(path) else _read_directory(path)


def config_of(path: Path) -> ModelConfig:
    """The config of a model directory or GGUF file. The weights are not opened. Raises UserError."""
    return read_config(read_header(path)) if is_gguf(path) else load_config(path)


def open_checkpoint(directory: Path, config: ModelConfig) -> Checkpoint:
    """A directory's weights, checked against the config. Raises UserError."""
    if config.packed:
        packed = PackedCheckpoint(directory, config.packed, config.STORED)
        packed.check_against(config.parameter_shapes(), config.may_be_packed())
        _check_tied(packed, config)
        return packed
    checkpoint = Checkpoint(directory, config.STORED)
    checkpoint.check_against(config.parameter_shapes())
    _check_tied(checkpoint, config)
    return checkpoint


def _check_tied(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raises UserError if a tied embedding has an LM head beside it that is no copy: transformers would use that."""
    if not config.tie_word_embeddings or config.HEAD not in checkpoint.names():
        return
    rows, step = config.vocab_size, max(1, _AT_A_TIME // config.hidden_size)

    def piece(name: str, start: int) -> np.ndarray:
        return checkpoint.read_f32(name, start, min(start + step, rows))

    if checkpoint.shape(config.HEAD) != checkpoint.shape(config.EMBEDDING) or not all(
        np.array_equal(piece(config.HEAD, start), piece(config.EMBEDDING, start), equal_nan=True)
        for start in range(0, rows, step)
    ):
        raise UserError(
            f"{config.HEAD} in {checkpoint.directory} differs from {config.EMBEDDING}, although config.json ties them: "
            "set tie_word_embeddings to false there, or remove the tensor."
        )


def _read_directory(directory: Path) -> ModelFiles:
    if not (directory / "config.json").exists() and (files := sorted(directory.glob("*.gguf"))):
        raise UserError(
            f"{directory} has no config.json but holds GGUF files: give the path of one, such as {files[0]}."
        )
    if not (directory / "config.json").exists() and (directory / CONFIG).exists():
        raise UserError(
            f"{directory} is an adapter, not a model: give it as {flag('adapter')}, or as {flag('init_adapter')} to "
            f"train it further, and the model that it was trained on as {flag('model')}."
        )
    config = load_config(directory)
    return ModelFiles(config, open_checkpoint(directory, config), Tokenizer.load(directory))


def _read_gguf(path: Path) -> ModelFiles:
    header = read_header(path)
    config = read_config(header)
    tokenizer = read_tokenizer(header, config.vocab_size, config.gguf().pretokenizer)
    return ModelFiles(config, open_weights(header, config), tokenizer)
