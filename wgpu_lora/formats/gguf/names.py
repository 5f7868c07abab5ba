"""What GGUF calls the tensors of a model, and the one difference in what it holds: rotated pairs lie side by side."""

from __future__ import annotations

import numpy as np

from wgpu_lora.models.config import LINEAR_PATHS, ModelConfig

# model_type -> general.architecture. llama.cpp runs Mistral's dense models as llama.
ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama", "mistral": "llama"}
MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
} | {LINEAR_PATHS[module]: name for module, name in MODULES.items()}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor: 'model.layers.0.self_attn.q_proj.weight' -> 'blk.0.attn_q.weight'. KeyError: unknown."""
    path, _, kind = name.rpartition(".")
    if path in _WHOLE:
        return f"{_WHOLE[path]}.{kind}"
    layer, _, inner = path.removeprefix("model.layers.").partition(".")
    return f"blk.{int(layer)}.{_BLOCK[inner]}.{kind}"


def rotated_heads(config: ModelConfig, name: str) -> int | None:
    """Heads of a tensor (weight or bias, Hugging Face's name) whose rows GGUF stores in another order, else None.

    llama.cpp's 'llama' rotates neighbours, x[2i] and x[2i + 1], where transformers has x[i] and x[i + head_dim / 2].
    """
    if ARCHITECTURES[config.architecture] != "llama":
        return None
    path = name.rpartition(".")[0]
    if path.endswith("q_proj"):
        return config.num_attention_heads
    return config.num_key_value_heads if path.endswith("k_proj") else None


def to_neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, ...] in GGUF's order from transformers'. Whole heads may be given, with their count."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def to_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `to_neighbours`."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
