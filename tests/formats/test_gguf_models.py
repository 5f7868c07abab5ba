"""GGUF files of architectures of which llama.cpp fixes what config.json states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.gguf_models import changed, make_adapter, read, small, values
from support.models import full_logits

from wgpu_lora.errors import UserError
from wgpu_lora.export.adapter_merge import merge_adapter
from wgpu_lora.export.gguf_export import export_model
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.architectures import load_config
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.models.model_files import config_of

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


def test_longrope_of_phi(device: Device, tmp_path: Path) -> None:
    """Exported and read back: the same config but for rounding, and the same logits, also of a merged directory."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
    stated = {"rope_parameters": rope, "original_max_position_embeddings": 16, "sliding_window": 12}
    model = small(tmp_path / "model", "phi3", tie_word_embeddings=False, **stated)
    adapter = make_adapter(tmp_path / "adapter", model)
    written = export_model(model, tmp_path / "f16.gguf", "f16")
    assert any("context of up to 16 tokens" in note for note in written.notes)
    facts, tensors = read(tmp_path / "f16.gguf")
    assert facts["phi3.rope.dimension_count"] == 12
    np.testing.assert_array_equal(values(tensors["rope_factors_long.weight"]), np.float32(rope["long_factor"]))
    again, before = config_of(tmp_path / "f16.gguf"), load_config(model)
    assert again.switch() == before.switch() == 16
    assert again.sliding_windows == before.sliding_windows
    assert again.partial_rotary_factor == 0.75
    np.testing.assert_allclose(again.rope_scaling.attention_factor, before.rope_scaling.attention_factor, rtol=1e-6)
    np.testing.assert_allclose(again.rope_scaling.factors, before.rope_scaling.factors, rtol=1e-6)
    found, expected = logits(tmp_path / "f16.gguf", device), logits(model, device)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    for base in (model, tmp_path / "f16.gguf"):
        merge_adapter(base, adapter, tmp_path / f"merged{len(base.suffix)}", "f32")
    found, expected = (logits(tmp_path / f"merged{kind}", device) for kind in (5, 0))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
MINISTRAL = {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}


def test_ministral3(device: Device, tmp_path: Path) -> None:
    """Queries scaled by position; yarn's factor also as llama.cpp's converter states it."""
    alike = {"mscale": 1.0, "mscale_all_dim": 1.0}
    model = small(tmp_path / "model", "ministral3", rope_parameters={**MINISTRAL, **alike}, head_dim=16)
    export_model(model, tmp_path / "f16.gguf", "f16")
    facts, _ = read(tmp_path / "f16.gguf")
    assert facts["mistral3.attention.temperature_scale"] == pytest.approx(0.3)
    assert facts["mistral3.rope.scaling.original_context_length"] == 16
    before = load_config(model)
    stated = {"mistral3.rope.scaling.yarn_log_multiplier": 1.0, "mistral3.rope.scaling.attn_factor": None}
    converted = changed(tmp_path / "f16.gguf", tmp_path / "converted.gguf", stated)
    expected = logits(model, device)
    for path in (tmp_path / "f16.gguf", converted):
        again = config_of(path)
        assert again.rope_scaling.attention_factor == pytest.approx(1.0)
        scaling = replace(again.rope_scaling, attention_factor=1.0)
        assert replace(again, eos_token_ids=before.eos_token_ids, rope_scaling=scaling) == before
        np.testing.assert_allclose(logits(path, device), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    stated["mistral3.rope.scaling.yarn_log_multiplier"] = float(-10 / np.log(4.0))  # a factor of 0, to be divided by
    with pytest.raises(UserError, match=r"yarn_log_multiplier in .* must not be negative"):
        config_of(changed(tmp_path / "f16.gguf", tmp_path / "negative.gguf", stated))
    adapter = make_adapter(tmp_path / "adapter", model)
    for base, name in ((model, "a"), (converted, "b")):
        merge_adapter(base, adapter, tmp_path / name, "f32")
    expected = logits(tmp_path / "a", device)
    np.testing.assert_allclose(logits(tmp_path / "b", device), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_window_of_ministral3_is_read_back(tmp_path: Path) -> None:
    model = small(tmp_path / "model", "ministral3", rope_parameters=MINISTRAL, head_dim=16, sliding_window=9)
    assert any(
        "ignores this model's sliding window of 9" in note for note in export_model(model, tmp_path / "m.gguf").notes
    )
    assert config_of(tmp_path / "m.gguf").sliding_windows == load_config(model).sliding_windows == (9, 9)


def test_mistral3_without_a_scale_is_mistral(device: Device, tmp_path: Path) -> None:
    text = small(tmp_path / "text", "mistral", sliding_window=None, tie_word_embeddings=False)
    whole = tmp_path / "whole"
    whole.mkdir()
    stated = {"model_type": "mistral3", "text_config": json.loads((text / "config.json").read_text())}
    (whole / "config.json").write_text(json.dumps(stated | {"vision_config": {}}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (whole / file).write_bytes((text / file).read_bytes())
    tensors = {f"language_model.{name}": values for name, values in load_file(text / "model.safetensors").items()}
    tensors["vision_tower.w"] = np.zeros(3, np.float32)
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    written = export_model(whole, tmp_path / "f16.gguf", "f16")
    assert any("text part" in note for note in written.notes)
    assert read(tmp_path / "f16.gguf")[0]["general.architecture"] == "mistral3"
    again, before = config_of(tmp_path / "f16.gguf"), load_config(text)
    assert replace(again, eos_token_ids=before.eos_token_ids) == before
    expected = logits(text, device)
    np.testing.assert_allclose(
        logits(tmp_path / "f16.gguf", device), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
    )


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
