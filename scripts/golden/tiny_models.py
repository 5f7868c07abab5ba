"""Tiny random models, one per architecture, each awkward in its own way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from scripts.golden.golden_optimizers import is_clear_cut

SEEDS = {
    "qwen2": 20, "qwen3": 30, "llama": 40, "mistral": 50, "smollm3": 70, "phi3": 80, "gemma2": 90, "gemma3_text": 104,
    "gemma3": 114, "ministral3": 121, "qwen3_5_text": 90, "ministral": 132,
}  # fmt: skip
# Of the saved weights; float32 unless stated.
OFFSETS = ("gemma2", "gemma3_text", "gemma3", "qwen3_5_text")  # architectures with norms by 1 + w
KEPT = ("in_proj_a", "in_proj_b")  # linear layers that are too small to be quantised
DTYPES = {"qwen2": torch.bfloat16, "qwen3": torch.float16, "smollm3": torch.bfloat16, "ministral": torch.float16}

_COMMON = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 128}


def _default_rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


CONFIGS: dict[str, dict] = {
    # dimensions that are multiples of nothing but 4; query heads wider together than the hidden state
    "qwen2": {
        "vocab_size": 301, "hidden_size": 52, "intermediate_size": 92, "num_hidden_layers": 3, "head_dim": 20,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "rope_parameters": _default_rope(1e6),
    },
    # three query heads to a key; the second layer alone has a window
    "qwen3": {
        "vocab_size": 271, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False,
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_parameters": _default_rope(1e6),
    },
    # biases everywhere; a pretraining context so short that llama3 scaling treats some pairs in each of its three ways
    "llama": {
        "vocab_size": 257, "hidden_size": 48, "intermediate_size": 68, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "attention_bias": True, "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    # four query heads to one key; a window shorter than most rows
    "mistral": {
        "vocab_size": 211, "hidden_size": 52, "intermediate_size": 76, "num_hidden_layers": 2, "head_dim": 12,
        "num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": False,
        "sliding_window": 6, "rope_parameters": _default_rope(1e4),
    },
    # the second layer has no positions, and a window
    "smollm3": {
        "vocab_size": 203, "hidden_size": 44, "intermediate_size": 60, "num_hidden_layers": 2, "head_dim": 12,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5,
        "rope_parameters": _default_rope(2e6),
    },
    # a part of each head is rotated, by other factors in rows of more than 9 tokens; a window in every layer
    "phi3": {
        "vocab_size": 223, "hidden_size": 80, "intermediate_size": 52, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "sliding_window": 8,
        "original_max_position_embeddings": 9,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.6,
            "original_max_position_embeddings": 9,
            "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0], "long_factor": [1.2, 1.9, 3.0, 4.5, 7.0, 9.0],
        },
    },
    # three value heads to a key head, which are wider; a quarter of each head is rotated
    "qwen3_5_text": {
        "vocab_size": 229, "hidden_size": 52, "intermediate_size": 68, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "rms_norm_eps": 1e-4,
        "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        "rope_parameters": {**_default_rope(1e4), "partial_rotary_factor": 0.25},
    },
    # three query heads to the only key head, wider together than the hidden state; the first layer alone has a window
    "ministral": {
        "vocab_size": 167, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 2, "head_dim": 20,
        "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": _default_rope(1e5),
    },
    # queries are scaled from the fifth token on; a key head for each query head
    "ministral3": {
        "vocab_size": 157, "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 2, "head_dim": 12,
        "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 4,
            "max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    # caps small enough to matter
    "gemma2": {
        "vocab_size": 199, "hidden_size": 56, "intermediate_size": 76, "num_hidden_layers": 2, "head_dim": 12,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "sliding_window": 5,
        "query_pre_attn_scalar": 17, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0,
        "rope_parameters": _default_rope(1e4),
    },
    # two sliding layers with positions of their own to one with linear scaling
    "gemma3_text": {
        "vocab_size": 193, "hidden_size": 44, "intermediate_size": 60, "num_hidden_layers": 3, "head_dim": 20,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True, "sliding_window": 5,
        "query_pre_attn_scalar": 13, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            "sliding_attention": _default_rope(1e4),
        },
    },
    # with a vision tower; head_dim 256 as in published models
    "gemma3": {
        "text_config": {
            **_COMMON, "model_type": "gemma3_text", "vocab_size": 149, "hidden_size": 32, "intermediate_size": 36,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 5,
            "sliding_window_pattern": 2,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        "mm_tokens_per_image": 4, "image_token_index": 148,
    },
}  # fmt: skip


def make(architecture: str) -> PreTrainedModel:
    """The random model of an architecture, in the dtype it is stored in."""
    stated = CONFIGS[architecture]
    common = {} if "text_config" in stated else _COMMON
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **common, **stated))
    model.to(DTYPES.get(architecture, torch.float32))
    rng = np.random.default_rng(SEEDS[architecture])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter, rng, architecture))
    return model


def save(architecture: str, directory: Path) -> None:
    """Writes the model as transformers does; llama's in shards with an index."""
    shard = "80KB" if architecture == "llama" else "1GB"
    make(architecture).save_pretrained(directory, max_shard_size=shard)


def load(directory: Path) -> PreTrainedModel:
    """The saved model, upcast to float32, with the plain attention."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def linears(model: PreTrainedModel) -> dict[tuple[int, str], torch.nn.Linear]:
    """The block's linear layers by (layer, module): what NF4 and LoRA apply to."""
    result = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name and "vision" not in name:
            parts = name.split(".")
            result[int(parts[parts.index("layers") + 1]), parts[-1]] = module
    return result


def _draw(name: str, parameter: torch.Tensor, rng: np.random.Generator, architecture: str) -> torch.Tensor:
    gemma = architecture.startswith("gemma")

    def normal(std: float, mean: float = 0.0) -> torch.Tensor:
        values = rng.standard_normal(tuple(parameter.shape)) * std + mean
        return torch.from_numpy(values.astype(np.float32)).to(parameter.dtype)

    if "vision_tower" in name or "projector" in name:
        return normal(0.1)
    if "norm" in name:
        by_one_more = architecture in OFFSETS and "linear_attn" not in name
        return normal(0.2, 0.0 if by_one_more else 1.0)
    if name.endswith((".A_log", ".dt_bias", ".conv1d.weight")):
        return normal(0.5)
    if name.endswith(".bias"):
        return normal(0.1)
    if "embed_tokens" in name and gemma:  # which are multiplied by the root of the hidden size
        return normal(0.1)
    if "embed_tokens" in name or "lm_head" in name:
        return normal(0.3)
    while True:
        weight = normal(parameter.shape[1] ** -0.5)
        if is_clear_cut(weight.float().numpy()):
            return weight
