"""The common decoder in GGUF: its metadata, read and written, and the models that llama.cpp cannot run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gguf import GGUFWriter, RopeScalingType
from gguf.constants import GGMLQuantizationType

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_header import Header, special_ids
from wgpu_lora.models.blocks.transformer_block import Transformer
from wgpu_lora.models.model_config import GGUFForm
from wgpu_lora.models.rotary_embedding import RopeScaling, inv_freq

# config.json's names -> keys of the metadata, without the architecture's name.
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
_BY_FACTORS = ("llama3", "factors")  # rope types that GGUF stores as a tensor
# The rope parameters of Llama 3.1 and later, except for the factor.
_LLAMA3: dict[str, Any] = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class TransformerGGUF(GGUFForm[Transformer]):
    """A `general.architecture` of GGUF whose models are common decoders.

    windowed: whether files have a sliding window and no biases, if this distinguishes architectures that share a name.
    attention_bias, mlp_bias: whether llama.cpp adds biases that config.json must state.
    output_bias: whether llama.cpp adds a bias of o_proj.
    factors: whether llama.cpp divides the rotary frequencies by a tensor of factors.
    split_heads: whether heads * head_dim may differ from the hidden size.
    log_multiplier: whether llama.cpp reads yarn's mscale_all_dim.
    """

    name: str
    windowed: bool | None = None
    attention_bias: bool = True
    mlp_bias: bool = False
    output_bias: bool = False
    factors: bool = False
    split_heads: bool = True
    pretokenizer: str | None = None
    log_multiplier: bool = False
    least_tensors: ClassVar[int] = 9  # per layer

    # -- reading ---------------------------------------------------------------------------------------------------

    def fields(self, header: Header) -> dict[str, Any] | None:
        path = header.path
        window, biases = self._number(header, "attention.sliding_window"), self._biases(header)
        if self.windowed is not None and self.windowed != bool(window and not any(biases.values())):
            return None

        d: dict[str, Any] = {name: self._required(header, key) for name, key in _FIELDS.items()}
        if self._number(header, "expert_count"):
            raise UserError(f"{path} is a mixture of experts, which is not supported: use a dense model.")
        # Checked before anything is created per layer.
        if self.least_tensors * d["num_hidden_layers"] > len(header.tensors):
            raise UserError(
                f"{path} claims {d['num_hidden_layers']:,} layers but holds {len(header.tensors):,} tensors: "
                "download or copy the file again."
            )
        embedding = header.tensors.get(_EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise UserError(f"{path} has no {_EMBEDDING} of two dimensions: give the file of a whole language model.")
        d |= {
            "vocab_size": embedding.shape[0],
            "num_key_value_heads": self._number(header, "attention.head_count_kv", d["num_attention_heads"]),
            "tie_word_embeddings": "output.weight" not in header.tensors,
            "rope_parameters": self._rope(header),
            "eos_token_id": special_ids(header, embedding.shape[0]),
            "head_dim": self._head_dim(header, d),
            **biases,
        }
        return d | ({"sliding_window": window} if self.windowed else {})

    def _number(self, header: Header, key: str, default: Any = None) -> Any:
        return header.number(f"{self.name}.{key}", default)

    def _required(self, header: Header, key: str) -> Any:
        value = self._number(header, key)
        if value is None:
            raise UserError(f"{header.path} does not state {self.name}.{key}: use another conversion of the model.")
        return value

    def _biases(self, header: Header) -> dict[str, bool]:
        """The biases of config.json, from the first layer's tensors. `GGUFCheckpoint` checks the others."""

        def has(*parts: str) -> bool:
            return any(f"blk.0.{part}.bias" in header.tensors for part in parts)

        result = {"attention_bias": has("attn_q", "attn_k", "attn_v")} if self.attention_bias else {}
        return result | ({"mlp_bias": has("ffn_gate", "ffn_up", "ffn_down")} if self.mlp_bias else {})

    def _head_dim(self, header: Header, d: Mapping[str, Any]) -> Any:
        heads, head_dim = d["num_attention_heads"], self._number(header, "attention.key_length")
        if head_dim is None and heads and isinstance(heads, int):
            head_dim = d["hidden_size"] // heads
        sizes = {
            "attention.value_length": self._number(header, "attention.value_length", head_dim),
            "rope.dimension_count": self.rotated(header, head_dim),
        }
        for key, value in sizes.items():
            if value != head_dim:
                raise UserError(
                    f"{self.name}.{key} in {header.path} is {value}, but heads of {head_dim} are expected: use another "
                    "model."
                )
        return head_dim

    def rotated(self, header: Header, head_dim: Any) -> Any:
        """The values of a head that must be as many as it has."""
        return self._number(header, "rope.dimension_count", head_dim)

    def _rope(self, header: Header) -> dict[str, Any]:
        """config.json's rope_parameters."""
        kind = header.values.get(f"{self.name}.rope.scaling.type")
        factor = self._number(header, "rope.scaling.factor", self._number(header, "rope.scale_linear"))
        if kind is None:
            kind = "linear" if factor else "none"
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self._number(header, "rope.freq_base", 10000.0),
        }
        if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
            return rope
        if kind not in ("linear", "yarn"):
            raise UserError(
                f"The rope scaling {kind!r:.100} of {header.path} is not supported: use a model of another kind."
            )
        rope |= {"rope_type": kind, "factor": factor}
        if kind == "linear":
            return rope
        yarn = {name: self._number(header, f"rope.scaling.{key}") for name, key in _YARN.items()}
        rope |= {name: value for name, value in yarn.items() if value is not None}
        attention_factor = self._number(header, "rope.scaling.attn_factor")
        neutral, log = {"yarn_ext_factor": 1}, 0
        if self.log_multiplier:
            log = self._number(header, "rope.scaling.yarn_log_multiplier", 0)
        else:
            neutral["yarn_log_multiplier"] = 0
        if log < 0:
            raise UserError(
                f"{self.name}.rope.scaling.yarn_log_multiplier in {header.path} is {log}, but must not be negative: "
                "use another conversion of the model."
            )
        if "attention_factor" not in rope and (attention_factor is not None or log) and (factor or 0) > 0:
            rope["attention_factor"] = (
                (1.0 if attention_factor is None else attention_factor) * _mscale(factor, 1.0) / _mscale(factor, log)
            )
        for key, value in neutral.items():
            if self._number(header, f"rope.scaling.{key}", value) not in (value, -1):
                raise UserError(f"{self.name}.rope.scaling.{key} in {header.path} is not supported: use another model.")
        return rope

    def ignored_tensors(self, header: Header) -> str:
        return r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight"  # read_tensors reads the first

    def read_tensors(self, config: Transformer, header: Header) -> Transformer:
        """Adds the frequency factors that llama.cpp's converter writes for llama3 scaling."""
        info = header.tensors.get(_FACTORS)
        if info is None:
            return config
        path, count = header.path, config.rotary_dim // 2
        if info.kind != GGMLQuantizationType.F32 or info.shape != (count,):
            raise UserError(f"{_FACTORS} in {path} does not have {count} F32 values: download or copy the file again.")
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

    def config_fields(self, config: Transformer, path: Path) -> dict[str, Any]:
        """Rope parameters for config.json: those of llama3 if they give the file's factors."""
        result: dict[str, Any] = {"hidden_act": "silu", "rope_theta": config.rope_theta}  # where transformers 4 looks
        if config.rope_scaling is None or config.rope_scaling.rope_type != "factors":
            return result
        scaling = {"rope_type": "llama3", "factor": round(max(config.rope_scaling.factors), 3), **_LLAMA3}
        like = replace(config, rope_scaling=RopeScaling(**scaling))
        if not np.allclose(inv_freq(like), inv_freq(config), rtol=1e-6, atol=0):
            raise UserError(
                f"{path} scales its frequencies by factors that config.json cannot express: import the model that it "
                "was converted from."
            )
        return result | {"rope_parameters": {"rope_theta": config.rope_theta, **scaling}}

    # -- writing ---------------------------------------------------------------------------------------------------

    def unsupported_feature(self, config: Transformer) -> str | None:
        scaling, width = config.rope_scaling, config.num_attention_heads * config.head_dim
        if config.attention_output_bias and not self.output_bias:
            return "a bias of o_proj"
        if width != config.hidden_size and not self.split_heads:
            return f"heads whose widths sum to {width} beside a hidden size of {config.hidden_size}"
        if scaling and scaling.rope_type in _BY_FACTORS and not self.factors:
            return f"the rope type {scaling.rope_type}"
        return "yarn without truncate" if scaling and not scaling.truncate else None

    def notes(self, config: Transformer) -> list[str]:
        windows = [window for window in config.sliding_windows if window and window < config.max_position_embeddings]
        if not windows:
            return []
        return [
            f"llama.cpp ignores this model's sliding window of {min(windows):,} tokens: texts of up to "
            f"{min(windows):,} tokens are exact, longer ones differ."
        ]

    def write(self, config: Transformer, writer: GGUFWriter) -> None:
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
        writer.add_rope_dimension_count(config.rotary_dim)
        writer.add_vocab_size(config.vocab_size)
        windows = set(config.sliding_windows)
        if self.windowed and len(windows) == 1 and (window := windows.pop()):
            writer.add_sliding_window(window)  # ignored by llama.cpp, but read back by `fields`
        _write_scaling(writer, config.rope_scaling)

    def tensors(self, config: Transformer) -> dict[str, np.ndarray]:
        """llama3 scaling as the factors that llama.cpp divides each pair's frequency by, float32 [rotary_dim / 2]."""
        if config.rope_scaling is None or config.rope_scaling.rope_type not in _BY_FACTORS:
            return {}
        plain = config.rope_theta ** -(np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim)
        return {_FACTORS: (plain / inv_freq(config)).astype(np.float32)}

    def widens_values(self, config: Transformer) -> bool:
        is_grouped = config.num_attention_heads != config.num_key_value_heads
        return config.num_hidden_layers == 80 and (self.name == "qwen2" or (self.name == "llama" and is_grouped))


def _mscale(factor: float, scale: float) -> float:
    """Yarn's attention factor; for a scale of 1, the default one."""
    return 1.0 + 0.1 * scale * math.log(max(factor, 1.0))


def _write_scaling(writer: GGUFWriter, scaling: RopeScaling | None) -> None:
    if scaling is None or scaling.rope_type in _BY_FACTORS:
        return
    writer.add_rope_scaling_type(RopeScalingType(scaling.rope_type))
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.rope_type != "yarn":
        return
    writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
    writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
    writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
    # llama.cpp multiplies this factor by yarn's default one.
    usual = _mscale(scaling.factor, 1.0)
    if not math.isclose(scaling.attention_factor, usual, rel_tol=1e-6):
        writer.add_rope_scaling_attn_factors(scaling.attention_factor / usual)
