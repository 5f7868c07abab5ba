"""What a model directory of Hugging Face holds beside its weights, from a GGUF file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.data.tokenizer import Tokenizer
from wgpu_lora.errors import UserError
from wgpu_lora.models.gguf import config_dict, read_config
from wgpu_lora.formats.gguf.header import read_header
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.rope import RopeScaling, inv_freq

_CLASSES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral"}
# What Llama 3.1 and all that came after it say, but for the factor.
_LLAMA3: dict[str, Any] = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def write_companions(path: Path, tokenizer: Tokenizer | None, directory: Path) -> None:
    """Writes config.json and, where there is one, the tokenizer's files.

    Raises:
        UserError: the model's frequencies are none that config.json can state.
    """
    header = read_header(path)
    config = read_config(header)
    stated = config_dict(header) | {"hidden_act": "silu"}
    stated["architectures"] = [f"{_CLASSES[config.architecture]}ForCausalLM"]
    if config.rope_scaling and config.rope_scaling.rope_type == "factors":
        stated["rope_parameters"] |= _stated_scaling(config, path)
    # where transformers 4 looks
    stated["rope_theta"] = config.rope_theta
    files = {"config.json": json.dumps(stated, indent=2) + "\n"} | (tokenizer.files() if tokenizer else {})
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content, encoding="utf-8")


def _stated_scaling(config: ModelConfig, path: Path) -> dict[str, Any]:
    """llama3's parameters, where they come to the factors that the file states."""
    assert config.rope_scaling
    factor = round(max(config.rope_scaling.factors), 3)
    stated: dict[str, Any] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    like = replace(config, rope_scaling=RopeScaling(**stated))
    if not np.allclose(inv_freq(like), inv_freq(config), rtol=1e-6, atol=0):
        raise UserError(
            f"{path} scales its frequencies by factors that config.json cannot state: import the model it was made of."
        )
    return stated
