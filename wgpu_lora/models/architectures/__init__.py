"""The registered architectures, by config.json's model_type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import read_json
from wgpu_lora.models.config_fields import token_ids
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.models.multimodal import text_part
from wgpu_lora.names.registry import Registry

ARCHITECTURES: Registry[type[ModelConfig]] = Registry(
    {
        "qwen2": "wgpu_lora.models.architectures.qwen2:Qwen2",
        "qwen3": "wgpu_lora.models.architectures.qwen3:Qwen3",
        "llama": "wgpu_lora.models.architectures.llama:Llama",
        "mistral": "wgpu_lora.models.architectures.mistral:Mistral",
        "qwen3_5_text": "wgpu_lora.models.architectures.qwen3_5:Qwen35Text",
        "qwen3_5": "wgpu_lora.models.architectures.qwen3_5:Qwen35",
        "ministral": "wgpu_lora.models.architectures.ministral:Ministral",
        "ministral3": "wgpu_lora.models.architectures.ministral:Ministral3",
        "mistral3": "wgpu_lora.models.architectures.ministral:Mistral3",
        "gemma2": "wgpu_lora.models.architectures.gemma2:Gemma2",
        "gemma3_text": "wgpu_lora.models.architectures.gemma3:Gemma3Text",
        "gemma3": "wgpu_lora.models.architectures.gemma3:Gemma3",
        "phi3": "wgpu_lora.models.architectures.phi3:Phi3",
        "smollm3": "wgpu_lora.models.architectures.smollm3:SmolLM3",
    }
)

# Parts of model_types that are known -> what they would need.
MISSING = {
    "moe": "mixtures of experts are not implemented",
    "qwen3_next": "mixtures of experts are not implemented",
    "mixtral": "mixtures of experts are not implemented",
    "gpt_oss": "mixtures of experts and attention sinks are not implemented",
    "deepseek": "mixtures of experts and latent attention are not implemented",
    "llama4": "mixtures of experts and chunked attention are not implemented",
    "mistral4": "mixtures of experts and latent attention are not implemented",
    "gemma3n": "per-layer embeddings, alternating updates and shared caches are not implemented",
    "gemma4": "per-layer embeddings and caches that layers share are not implemented",
    "phi4_multimodal": "adapters of its own for images and sounds are not implemented",
}


def parse_config(d: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Reads the content of a config.json written by transformers 5 or earlier.

    Args:
        where: names the source in errors.

    Raises:
        UserError: the model_type is not registered, or a field is missing, invalid or unsupported.
    """
    name = d.get("model_type")
    if isinstance(name, str) and (missing := next((reason for part, reason in MISSING.items() if part in name), None)):
        raise UserError(f"model_type {name!r:.100} in {where} is not supported, because {missing}: use another model.")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UserError(f"model_type {name!r:.100} in {where} is not supported: use one of {supported}.")
    kind = ARCHITECTURES[name]
    text_config = text_part(d, kind.TEXT_TYPES, where) if kind.TEXT_TYPES else d
    return kind.parse({**kind.defaults(text_config), **text_config}, where)


def load_config(directory: str | Path) -> ModelConfig:
    """Reads config.json, and the end-of-text ids of generation_config.json, if any.

    Raises:
        UserError: a file is missing, is not JSON, or describes an unsupported model.
    """
    directory = Path(directory)
    config = parse_config(read_json(directory / "config.json"), str(directory / "config.json"))
    generation = directory / "generation_config.json"
    if not generation.exists():
        return config
    generation_ids = token_ids(read_json(generation), str(generation))
    return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + generation_ids)))


def module_names() -> tuple[str, ...]:
    """The names of modules that adapters may target in any architecture, for shell completion."""
    return tuple(dict.fromkeys(name for kind in ARCHITECTURES.values() for name in kind.MODULES))
