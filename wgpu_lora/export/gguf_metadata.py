"""What a GGUF file says of a model's shape, and what llama.cpp's graphs cannot compute of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType, RopeScalingType, size_label

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.names import ARCHITECTURES
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.rope import inv_freq

ROPE_FREQS = "rope_freqs.weight"
BY_FACTORS = ("llama3", "factors")  # types of scaling that GGUF states as a tensor


def check_expressible(config: ModelConfig, model: Path) -> None:
    """UserError where llama.cpp would not load the model, or compute something else."""
    architecture, scaling = ARCHITECTURES[config.architecture], config.rope_scaling
    heads_width = config.num_attention_heads * config.head_dim
    reason = None
    if architecture != "llama" and config.attention_output_bias:
        reason = "a bias of o_proj"
    elif architecture == "qwen2" and heads_width != config.hidden_size:
        reason = f"heads whose widths sum to {heads_width} beside a hidden size of {config.hidden_size}"
    elif architecture != "llama" and scaling and scaling.rope_type in BY_FACTORS:
        reason = f"the rope type {scaling.rope_type}"
    elif scaling and not scaling.truncate:
        reason = "yarn without truncate"
    if reason:
        raise UserError(f"{model} has {reason}, which llama.cpp's {architecture} has not: write it with merge instead.")


def notes_on(config: ModelConfig) -> list[str]:
    """What llama.cpp does otherwise, said to the person who exports."""
    windows = [window for window in config.sliding_windows if window and window < config.max_position_embeddings]
    if not windows:
        return []
    return [
        f"llama.cpp lets every token see all before it, where this model sees the last {min(windows):,}: "
        f"texts of up to {min(windows):,} tokens are exact, longer ones differ."
    ]


def rope_freqs(config: ModelConfig) -> np.ndarray | None:
    """What llama.cpp divides each pair's frequency by, float32 [head_dim / 2]: how llama3's scaling is stated."""
    if config.rope_scaling is None or config.rope_scaling.rope_type not in BY_FACTORS:
        return None
    plain = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    return (plain / inv_freq(config)).astype(np.float32)


def write_general(writer: GGUFWriter, name: str, file_type: LlamaFileType, parameters: int, finetune: str) -> None:
    """general.*: what the file is; `finetune` names the adapter, or is empty."""
    writer.add_type("model")
    writer.add_name(name)
    writer.add_finetune(finetune)
    writer.add_size_label(size_label(parameters, parameters, 0, 0))
    writer.add_file_type(file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)


def write_shape(writer: GGUFWriter, config: ModelConfig) -> None:
    """The architecture's own keys."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.num_attention_heads * config.head_dim != config.hidden_size:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    windows = set(config.sliding_windows)
    if config.architecture == "mistral" and len(windows) == 1 and (window := windows.pop()):
        writer.add_sliding_window(window)  # llama.cpp passes it over; it is read back here
    _write_rope_scaling(writer, config)


def _write_rope_scaling(writer: GGUFWriter, config: ModelConfig) -> None:
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type in BY_FACTORS:
        return
    writer.add_rope_scaling_type(RopeScalingType(scaling.rope_type))
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.rope_type != "yarn":
        return
    writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
    writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
    writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
    # llama.cpp has yarn's usual factor of its own, and multiplies it by this one.
    usual = 1.0 + 0.1 * math.log(max(scaling.factor, 1.0))
    if not math.isclose(scaling.attention_factor, usual, rel_tol=1e-6):
        writer.add_rope_scaling_attn_factors(scaling.attention_factor / usual)
