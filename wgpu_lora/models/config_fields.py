"""Reads and checks fields of config.json. All functions raise UserError if a field is invalid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.weights.base_formats import packed_forms

# Limits several times larger than any published model, so that a damaged or hostile file cannot exhaust memory.
MOST = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "max_window_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_position_embeddings": 1 << 28,
    "original_max_position_embeddings": 1 << 28,
    "sliding_window": (1 << 31) - 1,
    "linear_num_key_heads": 1 << 12,
    "linear_num_value_heads": 1 << 12,
    "linear_key_head_dim": 1 << 12,
    "linear_value_head_dim": 1 << 12,
    "linear_conv_kernel_dim": 8,
}
MOST_OF_OTHERS = 1 << 20


def whole(d: Mapping[str, Any], name: str, where: str, default: int | None = None, minimum: int = 1) -> int:
    """An integer of at least `minimum` and at most MOST. Without a default, it is required."""
    value, maximum = d.get(name, default), MOST.get(name, MOST_OF_OTHERS)
    if value is None:
        raise UserError(f"{name} is missing from {where}: restore the file from the model's source.")
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        kind = f"whole number from {minimum} to {maximum:,}"
        raise UserError(f"{name} in {where} is {value!r:.40}, expected a {kind}: correct the file.")
    return value


def boolean(d: Mapping[str, Any], name: str, where: str, default: bool = False) -> bool:
    """A boolean, `default` if it is missing."""
    value = d.get(name, default)
    if not isinstance(value, bool):
        raise UserError(f"{name} in {where} is {value!r}, expected true or false: correct the file.")
    return value


def epsilon(d: Mapping[str, Any], where: str) -> float:
    """rms_norm_eps."""
    value = d.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UserError(
            f"rms_norm_eps in {where} is {value!r}, expected a small number such as 1e-6: correct the file."
        )
    return float(value)


def token_ids(d: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """eos_token_id, an id or a list of ids."""
    value = d.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < MOST["vocab_size"] for i in ids):
        raise UserError(f"eos_token_id in {where} is {value!r:.40}, expected token ids: correct the file.")
    return tuple(ids)


def packed(d: Mapping[str, Any], where: str) -> str | None:
    """The base format that quantization_config says the linear layers are stored in; None if there is none."""
    quantization = d.get("quantization_config")
    if not quantization:
        return None
    config = quantization if isinstance(quantization, Mapping) else {"quant_method": quantization}
    forms = packed_forms()
    for form in forms.values():
        if name := form.base_format(config):
            return name
    if config.get("load_in_8bit"):
        raise UserError(
            f"quantization_config in {where} says the weights are stored in 8 bits (LLM.int8), which is not supported: "
            "use the unquantised checkpoint, which is quantised on loading."
        )
    kind = next((value for key, value in config.items() if key.endswith("quant_type")), None)
    titles = " or ".join(dict.fromkeys(form.title for form in forms.values()))
    raise UserError(
        f"quantization_config in {where} says the weights are stored as {config.get('quant_method')!r}"
        f"{f' ({kind})' if kind else ''}, which is not supported: use {titles}, or the "
        "unquantised checkpoint (BF16, F16 or F32), which is quantised on loading."
    )
