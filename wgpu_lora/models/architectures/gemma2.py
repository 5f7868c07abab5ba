"""Gemma 2: soft caps of scores and logits; every other layer has a sliding window."""

from __future__ import annotations

from wgpu_lora.models.blocks.gemma import Gemma
from wgpu_lora.models.blocks.gemma_gguf import GemmaGGUF


class Gemma2(Gemma):
    POSITIONS = 8192
    TRANSFORMERS = "Gemma2ForCausalLM"
    EVERY = 2
    CAPS = (50.0, 30.0)
    GGUF = GemmaGGUF("gemma2", attention_bias=False)
