"""Reads a GGUF file as a model: its architecture, its config and its tensor names."""

from __future__ import annotations

from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.checkpoint import GGUFCheckpoint, Stored
from wgpu_lora.formats.gguf.header import Header
from wgpu_lora.models.architectures import ARCHITECTURES, parse_config
from wgpu_lora.models.config import TABLE, ModelConfig


def read_config(header: Header) -> ModelConfig:
    """The model's config. Raises UserError if it is invalid or unsupported."""
    config = parse_config(config_fields(header), str(header.path))
    return config.gguf().read_tensors(config, header)


def config_fields(header: Header) -> dict[str, Any]:
    """The fields of config.json, except for those that a tensor determines."""
    name = _general_architecture(header)
    for model_type, kind in ARCHITECTURES.items():
        if kind.GGUF is not None and kind.GGUF.name == name and (found := kind.GGUF.fields(header)) is not None:
            return {"model_type": model_type, **found}  # which may name another class for files of the same name
    raise UserError(f"{header.path} is a variant of {name!r} that is not supported: use another model.")


def open_weights(header: Header, config: ModelConfig) -> GGUFCheckpoint:
    """The file's weights under Hugging Face's names. Raises UserError as `GGUFCheckpoint` does."""
    names = gguf_names(config)
    tensors = {
        name: Stored(names[name], item.shape, item.layout, item.kind == TABLE)
        for name, item in config.parameters.items()
    }
    return GGUFCheckpoint(header, tensors, config.gguf().passed_over(header))


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """GGUF's name of each parameter: 'model.layers.0.self_attn.q_proj.weight' -> 'blk.0.attn_q.weight'."""
    config.gguf()
    found = {}
    for name, item in config.parameters.items():
        assert item.gguf is not None, f"{config.architecture} has a GGUF form, but {name} has no name in it"
        inner, kind = name.removeprefix(f"{config.LAYERS}."), name.rpartition(".")[2]
        block = "" if inner == name else f"blk.{inner.partition('.')[0]}."
        found[name] = f"{block}{item.gguf}.{kind}" if kind in ("weight", "bias") else f"{block}{item.gguf}"
    return found


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
