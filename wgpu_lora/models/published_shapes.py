"""Configs of published models by name, for benchmarks without their weights (from their config.json on the hub)."""

from __future__ import annotations

from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.models.architectures import parse_config
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.names.spelling import setting

_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "max_position_embeddings",
)
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ROWS: dict[str, tuple[Any, ...]] = {
    "qwen2.5-0.5b": ("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 1e-6, 1e6, True, 32768),
    "qwen2.5-1.5b": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 1e-6, 1e6, True, 32768),
    "qwen2.5-3b": ("qwen2", 151936, 2048, 11008, 36, 16, 2, 128, 1e-6, 1e6, True, 32768),
    "qwen2.5-7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 1e-6, 1e6, False, 32768),
    "qwen2.5-14b": ("qwen2", 152064, 5120, 13824, 48, 40, 8, 128, 1e-6, 1e6, False, 32768),
    "qwen3-0.6b": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 1e-6, 1e6, True, 40960),
    "qwen3-8b": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 1e-6, 1e6, False, 40960),
    "llama-3.2-1b": ("llama", 128256, 2048, 8192, 16, 32, 8, 64, 1e-5, 5e5, True, 131072),
    "llama-3.2-3b": ("llama", 128256, 3072, 8192, 28, 24, 8, 128, 1e-5, 5e5, True, 131072),
    "llama-3.1-8b": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 5e5, False, 131072),
    "llama-2-13b": ("llama", 32000, 5120, 13824, 40, 40, 40, 128, 1e-5, 1e4, False, 4096),
    "mistral-7b-v0.3": ("mistral", 32768, 4096, 14336, 32, 32, 8, 128, 1e-5, 1e6, False, 32768),
    "qwen3.5-0.8b": ("qwen3_5_text", 248320, 1024, 3584, 24, 8, 2, 256, 1e-6, 1e7, True, 262144),
    "qwen3.5-4b": ("qwen3_5_text", 248320, 2560, 9216, 32, 16, 4, 256, 1e-6, 1e7, True, 262144),
    "qwen3.5-9b": ("qwen3_5_text", 248320, 4096, 12288, 32, 16, 4, 256, 1e-6, 1e7, False, 262144),
    "qwen3-1.7b": ("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 1e-6, 1e6, True, 40960),
    "smollm2-135m": ("llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, 1e5, True, 8192),
    "smollm3-3b": ("smollm3", 128256, 2048, 11008, 36, 16, 4, 128, 1e-6, 5e6, True, 65536),
    "phi-4-mini": ("phi3", 200064, 3072, 8192, 32, 24, 8, 128, 1e-5, 1e4, True, 131072),
    "gemma-2-2b": ("gemma2", 256000, 2304, 9216, 26, 8, 4, 256, 1e-6, 1e4, True, 8192),
    "gemma-3-1b": ("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 256, 1e-6, 1e6, True, 32768),
    "gemma-3-4b": ("gemma3_text", 262208, 2560, 10240, 34, 8, 4, 256, 1e-6, 1e6, True, 131072),
    # Not a published model: the shape of the training-step benchmarks.
    "tiny-qwen3": ("qwen3", 4096, 512, 1536, 8, 8, 4, 64, 1e-6, 1e6, True, 4096),
}
_MORE: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {"linear_num_value_heads": 16},
    # Without longrope, whose factors change neither sizes nor work.
    "phi-4-mini": {"partial_rotary_factor": 0.75, "sliding_window": None},
    "gemma-3-1b": {"sliding_window": 512},
    "gemma-3-4b": {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
}
_ROPE_FACTOR = {"llama-3.2-1b": 32.0, "llama-3.2-3b": 32.0, "llama-3.1-8b": 8.0}
SHAPES = tuple(_ROWS)


def shape_config(name: str, layers: int | None = None) -> ModelConfig:
    """The config of a named shape, cut to its first `layers` layers. Raises UserError if the name is not known."""
    if name not in _ROWS:
        raise UserError(f"The shape {name} is not known: choose one of {', '.join(SHAPES)}.")
    values = dict(zip(_FIELDS, _ROWS[name], strict=True)) | _MORE.get(name, {})
    if name in _ROPE_FACTOR:
        values["rope_scaling"] = {**_LLAMA_ROPE, "factor": _ROPE_FACTOR[name]}
    return cut(parse_config(values, name), layers)


def cut(config: ModelConfig, layers: int | None) -> ModelConfig:
    """The config cut to its first `layers` layers. Raises UserError if it has fewer."""
    if layers is None:
        return config
    if not 1 <= layers <= config.num_hidden_layers:
        raise UserError(
            f"{setting('layers', layers)} is not possible: this model has {config.num_hidden_layers} layers."
        )
    return config.cut(layers)
