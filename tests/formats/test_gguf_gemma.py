"""GGUF files of architectures of which llama.cpp fixes what config.json states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.gguf_models import read, small, values
from support.models import full_logits

from wgpu_lora.errors import UserError
from wgpu_lora.export.gguf_model import export_model
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.architectures import load_config
from wgpu_lora.models.files import config_of
from wgpu_lora.models.inputs import Segment
from wgpu_lora.models.loaded import open_model

GEMMA: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 32}
GEMMA |= {"query_pre_attn_scalar": 32, "sliding_window": 16}


def logits(path: Path, device: Device) -> np.ndarray:
    model = open_model(str(path), device, "f32")
    model.load_weights()
    return full_logits(model, [Segment(np.arange(5, 29))])[0]


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text"])
def test_gemma(device: Device, tmp_path: Path, architecture: str) -> None:
    """Exported and read back: the same config, norms by sums, and the same logits."""
    model = small(tmp_path / "model", architecture, **GEMMA)
    export_model(model, tmp_path / "f16.gguf", "f16")
    facts, tensors = read(tmp_path / "f16.gguf")
    name = architecture.removesuffix("_text")
    assert facts["general.architecture"] == name
    assert facts[f"{name}.attention.sliding_window"] == 16
    caps = [facts.get(f"{name}.{kind}_logit_softcapping") for kind in ("attn", "final")]
    assert caps == ([50.0, 30.0] if name == "gemma2" else [None, None])
    stored = load_file(model / "model.safetensors")["model.layers.1.post_feedforward_layernorm.weight"]
    np.testing.assert_array_equal(values(tensors["blk.1.post_ffw_norm.weight"]), stored.astype(np.float32) + 1)
    again, before = config_of(tmp_path / "f16.gguf"), load_config(model)
    assert replace(again, eos_token_ids=before.eos_token_ids) == before
    found, expected = logits(tmp_path / "f16.gguf", device), logits(model, device)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("gemma2", {"query_pre_attn_scalar": 7}, "a query_pre_attn_scalar of 7"),
        ("gemma2", {"final_logit_softcapping": None}, "no soft caps"),
        ("gemma2", {"tie_word_embeddings": False}, "an LM head of its own"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "full attention in other layers than every 2th"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "a soft cap of its logits"),
        ("gemma3_text", {"rope_local_base_freq": 5e3}, "rotary embedding of its own"),
        ("smollm3", {"no_rope_layer_interval": 2}, "layers without positions other than every 4th"),
        ("smollm3", {"mlp_bias": True}, "has biases"),
    ],
)
def test_refusals(tmp_path: Path, architecture: str, changes: dict[str, Any], reason: str) -> None:
    model = small(tmp_path / "model", architecture, **((GEMMA if "gemma" in architecture else {}) | changes))
    with pytest.raises(UserError, match=reason):
        export_model(model, tmp_path / "f16.gguf", "f16")
