"""Gemma 2 and Gemma 3 in GGUF: llama.cpp applies their windows and soft caps, but fixes which layers have windows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf import GGUFWriter

from wgpu_lora.formats.gguf.gguf_header import Header
from wgpu_lora.models.blocks.transformer_gguf import TransformerGGUF

if TYPE_CHECKING:
    from wgpu_lora.models.blocks.gemma import Gemma

_LOCAL_THETA = 10000.0  # of layers with a window, fixed in llama.cpp
# Layers of the 27B models, whose scores llama.cpp divides by the root of hidden_size / heads instead of head_dim.
_WIDE = {"gemma2": 46, "gemma3": 62}


class GemmaGGUF(TransformerGGUF):
    def fields(self, header: Header) -> dict[str, Any] | None:
        d = super().fields(header)
        if d is None:
            return None
        window = self._required(header, "attention.sliding_window")
        d |= {"sliding_window": window, "query_pre_attn_scalar": self._scalar(d)}
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := self._number(header, name)) is not None:
                d[name] = cap
        if self.name == "gemma3":
            d["rope_parameters"] = {
                "full_attention": d["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_THETA},
            }
        return d

    def _scalar(self, d: dict[str, Any]) -> Any:
        wide = d["num_hidden_layers"] == _WIDE[self.name]
        return d["hidden_size"] // d["num_attention_heads"] if wide else d["head_dim"]

    def stated(self, config: Any, path: Path) -> dict[str, Any]:
        found = super().stated(config, path)
        found.pop("hidden_act")
        return found | {"hidden_activation": "gelu_pytorch_tanh"}

    def refusal(self, config: Any) -> str | None:
        gemma: Gemma = config
        sizes = {name: getattr(gemma, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
        window = next((window for window in gemma.sliding_windows if window is not None), None)
        usual = tuple(window if (i + 1) % gemma.EVERY else None for i in range(gemma.num_hidden_layers))
        if gemma.query_pre_attn_scalar != self._scalar({**sizes, "head_dim": gemma.head_dim}):
            return f"a query_pre_attn_scalar of {gemma.query_pre_attn_scalar}"
        if window is None or gemma.sliding_windows != usual:
            return f"full attention in other layers than every {gemma.EVERY}th"
        if gemma.attention_bias:
            return "biases"
        if self.name == "gemma2" and not gemma.tie_word_embeddings:
            return "an LM head of its own"
        if self.name == "gemma2" and not (gemma.attention_cap and gemma.final_cap):
            return "no soft caps"
        if self.name == "gemma3":
            if gemma.final_cap:
                return "a soft cap of its logits"
            if (gemma.local_rope_theta, gemma.local_rope_scaling) != (_LOCAL_THETA, None):  # type: ignore[attr-defined]
                return "rotary embedding of its own in sliding layers"
        return super().refusal(config)

    def notes(self, config: Any) -> list[str]:
        return []

    def write(self, config: Any, writer: GGUFWriter) -> None:
        super().write(config, writer)
        writer.add_sliding_window(next(window for window in config.sliding_windows if window))
        if config.attention_cap:
            writer.add_attn_logit_softcapping(config.attention_cap)
        if config.final_cap:
            writer.add_final_logit_softcapping(config.final_cap)
