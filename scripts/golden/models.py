"""Tiny random models, one per architecture, each awkward in its own way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from golden.quant import is_clear_cut

SEEDS = {"qwen2": 20, "qwen3": 30, "llama": 40, "mistral": 50, "smollm3": 70, "phi3": 80, "qwen3_5_text": 90}
# Of the saved weights; float32 unless stated.
OFFSETS = ("qwen3_5_text",)  # architectures with norms by 1 + w
KEPT = ("in_proj_a", "in_proj_b")  # linear layers that are too small to be quantised
DTYPES = {"qwen2": torch.bfloat16, "qwen3": torch.float16, "smollm3": torch.bfloat16}

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
}  # fmt: skip


def make(architecture: str) -> PreTrainedModel:
    """The random model of an architecture, in the dtype it is stored in."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **_COMMON, **CONFIGS[architecture]))
    model.to(DTYPES.get(architecture, torch.float32))
    rng = np.random.default_rng(SEEDS[architecture])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter, rng, _norm_mean(architecture, name)))
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
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            parts = name.split(".")
            found[int(parts[parts.index("layers") + 1]), parts[-1]] = module
    return found


def _norm_mean(architecture: str, name: str) -> float:
    """0 for norms by 1 + w."""
    return 0.0 if architecture in OFFSETS and "linear_attn" not in name else 1.0


def _draw(name: str, parameter: torch.Tensor, rng: np.random.Generator, norm_mean: float) -> torch.Tensor:
    def normal(std: float, mean: float = 0.0) -> torch.Tensor:
        values = rng.standard_normal(tuple(parameter.shape)) * std + mean
        return torch.from_numpy(values.astype(np.float32)).to(parameter.dtype)

    if "norm" in name:
        return normal(0.2, norm_mean)
    if name.endswith((".A_log", ".dt_bias", ".conv1d.weight")):
        return normal(0.5)
    if name.endswith(".bias"):
        return normal(0.1)
    if "embed_tokens" in name or "lm_head" in name:
        return normal(0.3)
    while True:
        weight = normal(parameter.shape[1] ** -0.5)
        if is_clear_cut(weight.float().numpy()):
            return weight
