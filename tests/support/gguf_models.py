"""Models and adapters made for the tests of exporting, with the demo's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from wgpu_lora.files.assets import DEMO_MODEL
from wgpu_lora.formats.peft_adapter import tensor_name, write_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.models.architectures import load_config

DEMO = DEMO_MODEL
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
BASE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
BASE |= {"num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
ORIGINAL = {"original_max_position_embeddings": 64}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
GEMMA = {"head_dim": 128, "query_pre_attn_scalar": 128, "sliding_window": 24, "tie_word_embeddings": True}
# What config.json says beyond BASE; each of what exporting treats apart is in one of them.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-linear": {"model_type": "qwen2", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": False, "rope_theta": 1e6},
    "qwen3-yarn": {"model_type": "qwen3", "head_dim": 64, "rope_scaling": {**YARN, **ORIGINAL}},
    "llama-llama3": {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {**LLAMA3, **ORIGINAL}},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "llama-yarn": {"model_type": "llama", "rope_scaling": {**YARN, **ORIGINAL, "attention_factor": 1.2}},
    "smollm3": {"model_type": "smollm3", "pad_token_id": 0, "num_hidden_layers": 5, "rope_theta": 5e6},
    # llama.cpp asks models that are named phi3 for certain tokens.
    "phi": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0 + i / 48 for i in range(24)],
            "long_factor": [1.0 + i / 6 for i in range(24)],
        },
    },
    "gemma2": {"model_type": "gemma2", **GEMMA},
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        **GEMMA,
    },
    "qwen35": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 5,
        "head_dim": 128,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        **DELTA,
    },
    # Layers in an order of their own, as many key as value heads, another convolution.
    "qwen35-odd": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "head_dim": 64,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        **{**DELTA, "linear_num_key_heads": 6},
        "linear_conv_kernel_dim": 3,
    },
    # Queries by position, from 64 tokens on, and yarn's factor with mscale_all_dim, which makes it 1.
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "rope_parameters": {
            **{**YARN, **ORIGINAL, "rope_theta": 1e6},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    },
    "mistral": {"model_type": "mistral", "head_dim": 32, "sliding_window": None, "tie_word_embeddings": False},
}


def make_model(directory: Path, stated: dict[str, Any], seed: int = 0, tokenizer: Path = DEMO) -> Path:
    """A model of random weights, scaled so that attention and logits are lively, with the demo's tokenizer."""
    directory.mkdir(parents=True)
    config = {**BASE, **stated}
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, item in load_config(directory).parameters.items():
        shape = item.shape
        if name.endswith("norm.weight"):
            values = rng.uniform(0.7, 1.3, shape) - item.offset
        elif name.endswith("A_log"):
            values = rng.uniform(-3, 1, shape)
        elif name.endswith(("bias", "conv1d.weight")) or "embed" in name or "lm_head" in name:
            values = rng.normal(0, 0.4 if "conv1d" in name else 0.2, shape)
        else:
            gain = 1.2 if "q_proj" in name or "k_proj" in name else 0.7
            values = rng.normal(0, gain / shape[1] ** 0.5, shape)
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            # Queries like keys: the output of a head is normed, so that rounding tells all where they are orthogonal.
            keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
            values[:keys] = values[keys : 2 * keys] + 0.3 * values[:keys]
        tensors[name] = values.astype(np.float16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for file in TOKENIZER_FILES:
        if (tokenizer / file).exists():
            shutil.copyfile(tokenizer / file, directory / file)
    return directory


def make_adapter(directory: Path, model: Path, seed: int = 1, **config: Any) -> Path:
    """A random adapter of every linear layer, large enough to change every answer."""
    shapes, rng = load_config(model), np.random.default_rng(seed)
    adapter = AdapterConfig(**{"r": 4, "lora_alpha": 8, **config})
    tensors = {}
    for module, (rows, columns) in shapes.lora_modules.items():
        rank = adapter.rank(module)
        tensors[tensor_name(module, "A")] = rng.normal(0, columns**-0.5, (rank, columns)).astype(np.float32)
        tensors[tensor_name(module, "B")] = rng.normal(0, 0.1, (rows, rank)).astype(np.float32)
    write_adapter(directory, tensors, adapter)
    return directory


def small(directory: Path, architecture: str, **stated: Any) -> Path:
    """The same, of two narrow layers."""
    narrow = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return make_model(directory, {"model_type": architecture, **narrow, **stated})


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metadata, tensors) of a GGUF file as the gguf package reads them."""
    reader = gguf.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items()}, {t.name: t for t in reader.tensors}


def values(tensor: Any) -> np.ndarray:
    """A tensor of `read`'s, in float32 and the order of rows and columns."""
    return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])


def changed(path: Path, output: Path, changes: dict[str, Any]) -> Path:
    """A copy of a GGUF file with other metadata; None leaves a key out."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(output, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in changes:
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for key, value in changes.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output
