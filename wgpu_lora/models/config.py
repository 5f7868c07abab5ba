"""A model's config.json, read into one validated dataclass."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.bounded import read_json
from wgpu_lora.errors import UserError
from wgpu_lora.models.rope import RopeScaling, parse_rope
from wgpu_lora.names.allowed import LINEAR_PATHS

SUPPORTED_ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")

# What transformers takes where config.json is silent, for the fields whose default depends on the architecture.
_MAX_POSITIONS = {"qwen2": 32768, "qwen3": 32768, "llama": 2048, "mistral": 131072}

# What a config may say: several times the largest model that was published, so that nothing is built from a typing
# error or a trap.
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
    "sliding_window": (1 << 31) - 1,
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only language model, in config.json's own names.

    `architecture` is config.json's model_type. `attention_bias` says whether q, k and v have biases,
    `attention_output_bias` whether o does. `sliding_windows` holds one entry per layer: None attends to everything
    before, w attends to the last w tokens, the current one included. `packed`: the base format that the linears are
    stored in, if any.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    packed: str | None = None

    @classmethod
    def load(cls, directory: str | Path) -> ModelConfig:
        """Reads config.json, and the end-of-text ids that generation_config.json may add.

        Raises UserError when a file is missing, is not JSON, or describes something that is not supported.
        """
        directory = Path(directory)
        config = cls.from_dict(read_json(directory / "config.json"), str(directory / "config.json"))
        generation = directory / "generation_config.json"
        if not generation.exists():
            return config
        more = _token_ids(read_json(generation), str(generation))
        ids = tuple(dict.fromkeys(config.eos_token_ids + more))
        return cls(**{**config.__dict__, "eos_token_ids": ids})

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Reads what transformers 5 or earlier wrote; `where` names the source in errors (UserError)."""
        architecture = d.get("model_type")
        if architecture not in SUPPORTED_ARCHITECTURES:
            supported = ", ".join(SUPPORTED_ARCHITECTURES)
            raise UserError(f"model_type {architecture!r} in {where} is not supported: use one of {supported}.")
        _refuse_unsupported(d, architecture, where)
        hidden = _int(d, "hidden_size", where)
        heads = _int(d, "num_attention_heads", where)
        kv_heads = _kv_heads(d, architecture, heads, where)
        layers = _int(d, "num_hidden_layers", where)
        positions = _int(d, "max_position_embeddings", where, _MAX_POSITIONS[architecture])
        theta, scaling = parse_rope(d, positions, where)
        bias = architecture == "qwen2" or _bool(d, "attention_bias", where)
        return cls(
            architecture=architecture,
            vocab_size=_int(d, "vocab_size", where),
            hidden_size=hidden,
            intermediate_size=_int(d, "intermediate_size", where),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=_head_dim(d, architecture, hidden, heads, where),
            rms_norm_eps=_eps(d, where),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=positions,
            tie_word_embeddings=_bool(d, "tie_word_embeddings", where),
            attention_bias=bias,
            attention_output_bias=bias and architecture != "qwen2",
            mlp_bias=_bool(d, "mlp_bias", where),
            qk_norm=architecture == "qwen3",
            sliding_windows=_sliding_windows(d, architecture, layers, where),
            eos_token_ids=_token_ids(d, where),
            packed=_packed(d, where),
        )

    def digest(self) -> str:
        """A sha256 (hex) of what decides what the model computes."""
        facts = {name: value for name, value in asdict(self).items() if name not in ("eos_token_ids", "packed")}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each linear layer of a block, keyed by the names LoRA targets ('q_proj', ...)."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }

    def has_bias(self, module: str) -> bool:
        """Whether the linear layer of this name ('q_proj', ...) has a bias."""
        if module in ("q_proj", "k_proj", "v_proj"):
            return self.attention_bias
        return self.attention_output_bias if module == "o_proj" else self.mlp_bias

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of this model must hold: Hugging Face name -> shape."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (self.hidden_size,)
            for module, shape in self.linear_shapes().items():
                path = prefix + LINEAR_PATHS[module]
                shapes[path + ".weight"] = shape
                if self.has_bias(module):
                    shapes[path + ".bias"] = shape[:1]
            if self.qk_norm:
                shapes[prefix + "self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[prefix + "self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[prefix + "post_attention_layernorm.weight"] = (self.hidden_size,)
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes


def _packed(d: Mapping[str, Any], where: str) -> str | None:
    """The base format that the linears are stored in: bitsandbytes' NF4, the only quantisation that is supported."""
    quantization = d.get("quantization_config")
    if not quantization:
        return None
    stated = quantization if isinstance(quantization, Mapping) else {"quant_method": quantization}
    method, kind = stated.get("quant_method"), stated.get("bnb_4bit_quant_type")
    if method == "bitsandbytes" and stated.get("load_in_4bit") and kind == "nf4":
        return str(kind)
    raise UserError(
        f"quantization_config in {where} says the weights are stored as {method!r}"
        f"{f' ({kind})' if kind else ''}, which is not supported: use bitsandbytes' NF4, or the unquantised checkpoint "
        "(BF16, F16 or F32), which is quantised to NF4 on loading."
    )


def _refuse_unsupported(d: Mapping[str, Any], architecture: str, where: str) -> None:
    act = d.get("hidden_act", "silu")
    if act != "silu":
        raise UserError(f"hidden_act {act!r} in {where} is not supported: use a model with 'silu'.")
    # transformers ignores these fields for the architectures left out here; a file that sets them means something else
    for name, honoured in (("attention_bias", ("qwen2", "qwen3", "llama")), ("mlp_bias", ("llama",))):
        if _bool(d, name, where) and architecture not in honoured:
            raise UserError(f"{name} = true in {where} is not supported for {architecture}: use another model.")


def _sliding_windows(d: Mapping[str, Any], architecture: str, layers: int, where: str) -> tuple[int | None, ...]:
    """One window per layer, as transformers' configuration classes resolve them."""
    window: int | None = None
    if architecture == "mistral" or (architecture in ("qwen2", "qwen3") and _bool(d, "use_sliding_window", where)):
        window = _int(d, "sliding_window", where, 4096) if d.get("sliding_window", 4096) is not None else None
    elif architecture == "llama" and d.get("sliding_window") is not None:
        raise UserError(f"sliding_window in {where} is not supported for llama: use another model.")
    types = d.get("layer_types")
    if types is None:
        first = _int(d, "max_window_layers", where, 28, minimum=0) if architecture != "mistral" else 0
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise UserError(f"layer_types in {where} must list {layers} layers (num_hidden_layers): correct the file.")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UserError(f"layer type {kind!r} in {where} is not supported: only full and sliding attention are.")
        if kind == "sliding_attention" and window is None:
            raise UserError(f"layer_types in {where} has sliding_attention but no sliding_window is set: correct it.")
        if architecture == "mistral" and kind == "full_attention" and window is not None:
            raise UserError(f"layer_types in {where} mixes attention kinds, which mistral does not: use another model.")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _kv_heads(d: Mapping[str, Any], architecture: str, heads: int, where: str) -> int:
    unset = d.get("num_key_value_heads") is None and (architecture == "llama" or "num_key_value_heads" in d)
    kv_heads = heads if unset else _int(d, "num_key_value_heads", where)
    if heads % kv_heads:
        raise UserError(
            f"num_attention_heads {heads} in {where} is not a multiple of num_key_value_heads {kv_heads}: correct it."
        )
    return kv_heads


def _head_dim(d: Mapping[str, Any], architecture: str, hidden: int, heads: int, where: str) -> int:
    if d.get("head_dim") is not None:
        head_dim = _int(d, "head_dim", where)
    elif architecture == "qwen3" and "head_dim" not in d:
        head_dim = 128  # the default of Qwen3Config; the others derive it
    elif hidden % heads:
        raise UserError(
            f"hidden_size {hidden} in {where} is not a multiple of num_attention_heads {heads}: correct it."
        )
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise UserError(f"head_dim {head_dim} in {where} is odd, but rotary embedding turns pairs: use another model.")
    return head_dim


def _int(d: Mapping[str, Any], name: str, where: str, default: int | None = None, minimum: int = 1) -> int:
    value = d.get(name, default)
    if value is None:
        raise UserError(f"{name} is missing from {where}: restore the file from the model's source.")
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MOST[name]:
        kind = f"whole number from {minimum} to {MOST[name]:,}"
        raise UserError(f"{name} in {where} is {value!r:.40}, expected a {kind}: correct the file.")
    return value


def _bool(d: Mapping[str, Any], name: str, where: str) -> bool:
    value = d.get(name, False)
    if not isinstance(value, bool):
        raise UserError(f"{name} in {where} is {value!r}, expected true or false: correct the file.")
    return value


def _eps(d: Mapping[str, Any], where: str) -> float:
    value = d.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UserError(
            f"rms_norm_eps in {where} is {value!r}, expected a small number such as 1e-6: correct the file."
        )
    return float(value)


def _token_ids(d: Mapping[str, Any], where: str) -> tuple[int, ...]:
    value = d.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < MOST["vocab_size"] for i in ids):
        raise UserError(f"eos_token_id in {where} is {value!r:.40}, expected token ids: correct the file.")
    return tuple(ids)
