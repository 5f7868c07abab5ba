"""Opens a model's files, in any supported format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_checkpoint import GGUFCheckpoint, GGUFTensor
from wgpu_lora.formats.gguf.gguf_header import Header, read_header
from wgpu_lora.formats.hub import is_gguf
from wgpu_lora.formats.peft_adapter import CONFIG
from wgpu_lora.formats.safetensors_checkpoint import Checkpoint, PackedCheckpoint
from wgpu_lora.formats.tokenizer.gguf_tokenizer import read_tokenizer
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.models.architectures import ARCHITECTURES, load_config, parse_config
from wgpu_lora.models.model_config import TABLE, ModelConfig
from wgpu_lora.names.spelling import flag
from wgpu_lora.weights.base import WeightSource

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


def read_config(header: Header) -> ModelConfig:
    """The model's config. Raises UserError if it is invalid or unsupported."""
    config = parse_config(config_fields(header), str(header.path))
    return config.gguf().read_tensors(config, header)


def config_fields(header: Header) -> dict[str, Any]:
    """The fields of config.json, except for those that a tensor determines."""
    name = _general_architecture(header)
    for model_type, kind in ARCHITECTURES.items():
        if kind.GGUF is not None and kind.GGUF.name == name and (result := kind.GGUF.fields(header)) is not None:
            return {"model_type": model_type, **result}  # which may name another class for files of the same name
    raise UserError(f"{header.path} is a variant of {name!r} that is not supported: use another model.")


def open_weights(header: Header, config: ModelConfig) -> GGUFCheckpoint:
    """The file's weights under Hugging Face's names. Raises UserError as `GGUFCheckpoint` does."""
    names = gguf_names(config)
    tensors = {
        name: GGUFTensor(names[name], item.shape, item.layout, item.kind == TABLE)
        for name, item in config.parameters.items()
    }
    return GGUFCheckpoint(header, tensors, config.gguf().ignored_tensors(header))


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """GGUF's name of each parameter: 'model.layers.0.self_attn.q_proj.weight' -> 'blk.0.attn_q.weight'."""
    config.gguf()
    result = {}
    for name, item in config.parameters.items():
        assert item.gguf is not None, f"{config.architecture} has a GGUF form, but {name} has no name in it"
        inner, kind = name.removeprefix(f"{config.LAYERS}."), name.rpartition(".")[2]
        block = "" if inner == name else f"blk.{inner.partition('.')[0]}."
        result[name] = f"{block}{item.gguf}.{kind}" if kind in ("weight", "bias") else f"{block}{item.gguf}"
    return result


def _general_architecture(header: Header) -> str:
    path, kind = header.path, header.values.get("general.type", "model")
    if kind != "model":
        raise UserError(f"{path} is a GGUF file of type {kind!r:.100}: give the file of a language model.")
    if header.values.get("split.count", 1) not in (0, 1):
        raise UserError(f"{path} is one part of a split model: join the parts with `llama-gguf-split --merge`.")
    architecture = header.values.get("general.architecture")
    if architecture is None:
        raise UserError(f"{path} does not state general.architecture: give the file of a language model.")
    supported = sorted({kind.GGUF.name for kind in ARCHITECTURES.values() if kind.GGUF is not None})
    if not isinstance(architecture, str) or architecture not in supported:
        raise UserError(
            f"The architecture {architecture!r:.100} of {path} is not supported: use a model of one of "
            f"{', '.join(supported)}."
        )
    return architecture
