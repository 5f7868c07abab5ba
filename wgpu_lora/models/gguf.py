"""A GGUF file's metadata as a `ModelConfig`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.header import Header
from wgpu_lora.formats.gguf.names import ARCHITECTURES
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.rope import RopeScaling

# config.json's names -> keys of the metadata, after the architecture's name and a dot.
_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_YARN = {
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
_EMBEDDING, _FACTORS = "token_embd.weight", "rope_freqs.weight"


def read_config(header: Header) -> ModelConfig:
    """The shape of the model; UserError when it is of a kind that is not supported, or makes no sense.

    A 'llama' that states a sliding window is a 'mistral': the converter gives both that name.
    """
    where = str(header.path)
    return _with_factors(ModelConfig.from_dict(config_dict(header), where), header)


def config_dict(header: Header) -> dict[str, Any]:
    """What config.json would say, but for the frequencies that a tensor states."""
    path, architecture = header.path, _architecture(header)
    get = _Metadata(header, architecture).number

    def required(key: str) -> int | float:
        value = get(key)
        if value is None:
            raise UserError(f"{path} does not state {architecture}.{key}: use another conversion of the model.")
        return value

    d: dict[str, Any] = {name: required(key) for name, key in _FIELDS.items()}
    if get("expert_count"):
        raise UserError(f"{path} is a mixture of experts, which is not supported: use a dense model.")
    # Said here because what follows is made layer by layer, and a layer has nine tensors at least.
    if 9 * d["num_hidden_layers"] > len(header.tensors):
        raise UserError(
            f"{path} claims {d['num_hidden_layers']:,} layers but holds {len(header.tensors):,} tensors: "
            "download or copy the file again."
        )
    embedding = header.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{path} has no {_EMBEDDING} of two dimensions: give the file of a whole language model.")
    heads = d["num_attention_heads"]
    d |= {
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(header, architecture),
        "eos_token_id": special_ids(header, embedding.shape[0]),
    }
    head_dim = get("attention.key_length")
    if head_dim is None and heads and isinstance(heads, int):
        head_dim = d["hidden_size"] // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise UserError(f"{architecture}.{key} in {path} is {get(key)}, but heads of {head_dim} are expected.")
    d["head_dim"] = head_dim
    if architecture != "qwen2":
        d["attention_bias"] = any(_has(header, f"attn_{part}.bias") for part in "qkv")
    if architecture == "llama":
        d["mlp_bias"] = any(_has(header, f"ffn_{part}.bias") for part in ("gate", "up", "down"))
        window = get("attention.sliding_window")
        if window and not d["attention_bias"] and not d["mlp_bias"]:
            d |= {"model_type": "mistral", "sliding_window": window}
    return d


def special_ids(header: Header, vocab_size: int) -> list[int]:
    """The ids that end a text, a turn or a message, as far as the metadata name them."""
    ids = (header.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(id for id in ids if type(id) is int and 0 <= id < vocab_size))


def _architecture(header: Header) -> str:
    path, kind = header.path, header.values.get("general.type", "model")
    if kind != "model":
        raise UserError(f"{path} is of the type {kind!r:.100}: give the file of a language model.")
    if header.values.get("split.count", 1) not in (0, 1):
        raise UserError(f"{path} is one part of a split model: join the parts with `llama-gguf-split --merge`.")
    architecture = header.values.get("general.architecture")
    if architecture is None:
        raise UserError(f"{path} does not state general.architecture: give the file of a language model.")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES.values():
        supported = ", ".join(sorted(set(ARCHITECTURES.values())))
        raise UserError(
            f"The architecture {architecture!r:.100} of {path} is not supported: use a model of one of {supported}."
        )
    return architecture


class _Metadata:
    """An architecture's numbers; UserError where one is something else."""

    def __init__(self, header: Header, architecture: str):
        self.header, self.prefix = header, architecture + "."

    def number(self, key: str, default: Any = None) -> Any:
        value = self.header.values.get(self.prefix + key, default)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if isinstance(value, float) and math.isfinite(value):
            return float(str(np.float32(value))) if abs(value) < 1e38 else value  # 1e-6, not its nearest f32
        raise UserError(
            f"{self.prefix}{key} in {self.header.path} is {value!r:.100}, expected one number: use another model."
        )


def _rope(header: Header, architecture: str) -> dict[str, Any]:
    """config.json's rope_parameters."""
    get, where = _Metadata(header, architecture).number, header.path
    kind = header.values.get(f"{architecture}.rope.scaling.type")
    factor = get("rope.scaling.factor", get("rope.scale_linear"))
    if kind is None:
        kind = "linear" if factor else "none"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": get("rope.freq_base", 10000.0)}
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return rope
    if kind not in ("linear", "yarn"):
        raise UserError(f"The rope scaling {kind!r:.100} of {where} is not supported: use a model of another kind.")
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return rope
    stated = {name: get(f"rope.scaling.{key}") for name, key in _YARN.items()}
    rope |= {name: value for name, value in stated.items() if value is not None}
    if "attention_factor" not in rope and (more := get("rope.scaling.attn_factor")) is not None and (factor or 0) > 0:
        rope["attention_factor"] = more * (1.0 + 0.1 * math.log(max(factor, 1.0)))  # beside yarn's usual one
    for key in ("yarn_ext_factor", "yarn_log_multiplier"):
        neutral = 0 if key == "yarn_log_multiplier" else 1
        if get(f"rope.scaling.{key}", neutral) not in (neutral, -1):
            raise UserError(f"{architecture}.rope.scaling.{key} in {where} is not supported: use another model.")
    return rope


def _has(header: Header, name: str) -> bool:
    """Whether the first layer has this tensor; `check_against` sees to the others."""
    return f"blk.0.{name}" in header.tensors


def _with_factors(config: ModelConfig, header: Header) -> ModelConfig:
    """The config with the frequencies' factors that llama.cpp's converter makes of llama3's scaling."""
    info = header.tensors.get(_FACTORS)
    if info is None:
        return config
    path, count = header.path, config.head_dim // 2
    if info.kind != GGMLQuantizationType.F32 or info.shape != (count,):
        raise UserError(f"{_FACTORS} in {path} is not of {count} F32 numbers: download or copy the file again.")
    factors = np.fromfile(path, "<f4", count, offset=info.offset).astype(np.float64)
    if factors.size != count or not np.isfinite(factors).all() or not (factors > 0).all():
        raise UserError(f"{_FACTORS} in {path} are not positive numbers: download or copy the file again.")
    if (factors == 1).all():
        return config
    if config.rope_scaling is not None:
        raise UserError(
            f"{path} has both {_FACTORS} and {config.rope_scaling.rope_type} scaling: use another conversion of it."
        )
    scaling = RopeScaling("factors", 1.0, config.max_position_embeddings, factors=tuple(factors.tolist()))
    return replace(config, rope_scaling=scaling)
