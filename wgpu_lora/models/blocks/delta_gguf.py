"""Qwen3.5 in GGUF: the sizes of its delta nets, which layers they are, and what llama.cpp takes for granted."""

from __future__ import annotations

from typing import Any

from gguf import GGUFWriter

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_header import Header
from wgpu_lora.models.blocks.delta_net import L2_EPS
from wgpu_lora.models.blocks.transformer_gguf import TransformerGGUF

# Of the rotated pairs, those that turn with time, height and width in images. For text all turn with the position.
_SECTIONS = [11, 11, 10, 0]
_SIZES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_RECURRENT = "attention.recurrent_layers"


class DeltaGGUF(TransformerGGUF):
    def fields(self, header: Header) -> dict[str, Any] | None:
        d = super().fields(header)
        if d is None:
            return None
        blocks = d["num_hidden_layers"]
        d["num_hidden_layers"] = layers = blocks - self._predicting(header)
        for name, key in _SIZES.items():
            d[name] = self._required(header, key)
        inner, heads = self._required(header, "ssm.inner_size"), d["linear_num_value_heads"]
        if not isinstance(inner, int) or not isinstance(heads, int) or heads < 1 or inner % heads:
            raise UserError(
                f"{self.name}.ssm.inner_size {inner!r:.100} in {header.path} is not a multiple of "
                f"{self.name}.ssm.time_step_rank {heads!r:.100}: use another conversion of the model."
            )
        d["linear_value_head_dim"] = inner // heads
        rotated = self._number(header, "rope.dimension_count", d["head_dim"])
        d["rope_parameters"]["partial_rotary_factor"] = rotated / d["head_dim"] if d["head_dim"] else 1.0
        kinds = header.numbers(f"{self.name}.{_RECURRENT}", blocks)
        if kinds is None:
            d["full_attention_interval"] = self._number(header, "full_attention_interval", 4)
        else:
            named = ["linear_attention" if kind else "full_attention" for kind in kinds.tolist()]
            d["layer_types"] = named[: int(layers)]
        return d

    def rotated(self, header: Header, head_dim: Any) -> Any:
        return head_dim  # a part of it, which `fields` reads

    def passed_over(self, header: Header) -> str:
        """The layer that predicts a further token, if there is one."""
        blocks, predicting = self._required(header, "block_count"), self._predicting(header)
        layers = "|".join(str(layer) for layer in range(blocks - predicting, blocks))
        return rf"blk\.(?:{layers})\..*" if layers else ""

    def _predicting(self, header: Header) -> int:
        count = self._number(header, "nextn_predict_layers", 0)
        if count not in (0, 1):
            raise UserError(
                f"{self.name}.nextn_predict_layers in {header.path} is {count!r:.100}, expected 0 or 1: use another "
                "conversion of the model."
            )
        return int(count)

    def refusal(self, config: Any) -> str | None:
        keys, values = config.linear_key_head_dim, config.linear_value_head_dim
        if keys != values:
            return f"keys of {keys} and values of {values} in its delta nets"
        if config.rms_norm_eps != L2_EPS:
            return f"an rms_norm_eps of {config.rms_norm_eps:g}, which is also that of the keys' norms"
        return super().refusal(config)

    def write(self, config: Any, writer: GGUFWriter) -> None:
        super().write(config, writer)
        for name, key in _SIZES.items():
            writer.add_uint32(f"{self.name}.{key}", getattr(config, name))
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_rope_dimension_sections(_SECTIONS)
        every = interval(config.linear_layers)
        if every is None:
            writer.add_array(f"{self.name}.{_RECURRENT}", list(config.linear_layers))
        else:
            writer.add_full_attention_interval(every)


def interval(linear: tuple[bool, ...]) -> int | None:
    """Every how many layers there is one that is no delta net; None if they are in another order."""
    every = linear.index(False) + 1 if False in linear else len(linear) + 1
    return every if all(kind == ((layer + 1) % every != 0) for layer, kind in enumerate(linear)) else None
