"""Qwen3.5 in GGUF files: what is written is read again, in the order in which llama.cpp has the heads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.gguf_models import changed, make_adapter, make_model, read, small, values
from support.models import full_logits

from wgpu_lora.errors import UserError
from wgpu_lora.export.adapter_merge import merge_adapter
from wgpu_lora.export.gguf_export import export_adapter, export_model
from wgpu_lora.formats.gguf.gguf_layout import InterleavedHalves, Layout, Tiled, read_rows_in_order
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.architectures import load_config
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.models.model_files import config_of

SIZES = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
STATED: dict[str, Any] = {**SIZES, "head_dim": 32, "rope_theta": 1e4, "tie_word_embeddings": True}
TYPES = ["linear_attention", "full_attention", "linear_attention"]
NET = "model.layers.0.linear_attn"


def made(directory: Path, **stated: Any) -> Path:
    return small(directory, "qwen3_5_text", **{**STATED, "num_hidden_layers": 3, "layer_types": TYPES, **stated})


def logits(path: Path, device: Device) -> np.ndarray:
    model = open_model(str(path), device, "f32")
    model.load_weights()
    return full_logits(model, [Segment(np.arange(5, 29))])[0]


def assert_same_logits(device: Device, found: Path, expected: Path) -> None:
    theirs = logits(expected, device)
    np.testing.assert_allclose(logits(found, device), theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_orders() -> None:
    dealt = Tiled(groups=2, heads=6, start=1).index(13)
    # Heads 0, 1, 2 use the first key head, 3, 4, 5 the second; of each, the first comes first.
    assert dealt.tolist() == [0, 1, 2, 7, 8, 3, 4, 9, 10, 5, 6, 11, 12]
    assert InterleavedHalves(2).index(8).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    rows = np.arange(200.0).reshape(100, 2)
    order = np.random.default_rng(0).permutation(100)[:37]
    reads: list[tuple[int, int]] = []

    def reading(start: int, stop: int) -> np.ndarray:
        reads.append((start, stop))
        return rows[start:stop]

    np.testing.assert_array_equal(read_rows_in_order(reading, order), rows[order])
    reads.clear()
    np.testing.assert_array_equal(read_rows_in_order(reading, np.array([70, 71, 0, 1])), rows[[70, 71, 0, 1]])
    assert reads == [(0, 2), (70, 72)]  # what is far apart is not read as a whole
    layout = Layout(columns=InterleavedHalves(1), offset=1.0)
    there = layout.written(np.float32([[1, 2, 3, 4]]))
    assert there.tolist() == [[2, 4, 3, 5]]
    assert layout.columns_back(layout.values(there)).tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_exported_and_read_back(device: Device, tmp_path: Path, kind: str) -> None:
    model = made(tmp_path / "model")
    export_model(model, tmp_path / "m.gguf", kind)
    facts, tensors = read(tmp_path / "m.gguf")
    stated = {name: facts.get(f"qwen35.{name}") for name in ("rope.dimension_count", "rope.dimension_sections")}
    assert stated == {"rope.dimension_count": 8, "rope.dimension_sections": [11, 11, 10, 0]}
    sizes = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    assert [facts[f"qwen35.ssm.{name}"] for name in sizes] == [4, 16, 2, 6, 96]
    assert facts["qwen35.full_attention_interval"] == 2
    weights = load_file(model / "model.safetensors")
    order = [0, 3, 1, 4, 2, 5]
    rates = -np.exp(weights[f"{NET}.A_log"].astype(np.float32))
    np.testing.assert_allclose(values(tensors["blk.0.ssm_a"]), rates[order], rtol=1e-6)
    np.testing.assert_array_equal(values(tensors["blk.0.ssm_dt.bias"]), weights[f"{NET}.dt_bias"][order])
    np.testing.assert_array_equal(values(tensors["blk.0.ssm_norm.weight"]), weights[f"{NET}.norm.weight"])
    kernel = values(tensors["blk.0.ssm_conv1d.weight"])
    taps = weights[f"{NET}.conv1d.weight"][:, 0]
    np.testing.assert_array_equal(kernel[:64], taps[:64])  # of q and k
    np.testing.assert_array_equal(kernel[64:], taps[64:].reshape(6, 16, 4)[order].reshape(96, 4))
    norm = weights["model.layers.1.post_attention_layernorm.weight"].astype(np.float32) + 1
    np.testing.assert_array_equal(values(tensors["blk.1.post_attention_norm.weight"]), norm)
    again, before = config_of(tmp_path / "m.gguf"), load_config(model)
    assert replace(again, eos_token_ids=before.eos_token_ids) == before
    if kind == "f16":
        assert_same_logits(device, tmp_path / "m.gguf", model)
        return
    # Columns of out_proj are in another order, so what is read has to be decoded first.
    model_read = open_model(str(tmp_path / "m.gguf"), device, "f32").checkpoint
    name = f"{NET}.out_proj.weight"
    whole = model_read.read_f32(name)
    assert 0 < np.abs(whole - weights[name]).max() < 0.01
    np.testing.assert_array_equal(model_read.read_raw(name, 3, 40).view(np.float32), whole[3:40])
    name = f"{NET}.in_proj_qkv.weight"
    whole = model_read.read_f32(name)
    assert 0 < np.abs(whole - weights[name]).max() < 0.01
    np.testing.assert_array_equal(model_read.read_f32(name, 60, 99), whole[60:99])


@pytest.mark.parametrize(("kinds", "regular"), [("LLL", True), ("FFF", True), ("LFL", True), ("FLF", False)])
def test_layers_in_any_order(tmp_path: Path, kinds: str, regular: bool) -> None:
    model = made(tmp_path / "model", layer_types=[{"L": TYPES[0], "F": TYPES[1]}[kind] for kind in kinds])
    export_model(model, tmp_path / "m.gguf", "f16")
    facts, _ = read(tmp_path / "m.gguf")
    assert ("qwen35.attention.recurrent_layers" in facts) != regular
    assert config_of(tmp_path / "m.gguf").linear_layers == load_config(model).linear_layers  # type: ignore[attr-defined]


def test_merged_from_either_form(device: Device, tmp_path: Path) -> None:
    """Also what `merge` makes of a GGUF file is a model directory with all sizes."""
    model = made(tmp_path / "model", tie_word_embeddings=False)
    adapter = make_adapter(tmp_path / "adapter", model)
    export_model(model, tmp_path / "m.gguf", "f16")
    export_model(model, tmp_path / "merged.gguf", "f16", adapter)
    for source, name in ((model, "a"), (tmp_path / "m.gguf", "b")):
        merge_adapter(source, adapter, tmp_path / name, "f32")
    assert_same_logits(device, tmp_path / "b", tmp_path / "a")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text"
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    found, expected = logits(tmp_path / "merged.gguf", device), logits(tmp_path / "a", device)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-3 * np.abs(expected).max())  # of f16
    export_adapter(model, adapter, tmp_path / "lora.gguf")
    _, factors = read(tmp_path / "lora.gguf")
    own = load_file(adapter / "adapter_model.safetensors")
    out = own[f"base_model.model.{NET}.out_proj.lora_A.weight"]
    order = np.arange(96).reshape(2, 3, 16).swapaxes(0, 1).ravel()
    np.testing.assert_array_equal(values(factors["blk.0.ssm_out.weight.lora_a"]), out[:, order])


def test_a_model_with_a_vision_tower(tmp_path: Path) -> None:
    """Its language model is written, and it is said that the rest is not."""
    text = made(tmp_path / "text")
    whole = tmp_path / "whole"
    whole.mkdir()
    config = json.loads((text / "config.json").read_text())
    stated = {"model_type": "qwen3_5", "text_config": config, "vision_config": {}, "tie_word_embeddings": True}
    (whole / "config.json").write_text(json.dumps(stated))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (whole / file).write_bytes((text / file).read_bytes())
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    tensors |= {"model.visual.blocks.0.w": np.zeros(3, np.float32), "mtp.fc.weight": np.zeros((2, 2), np.float32)}
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    written = export_model(whole, tmp_path / "whole.gguf", "f16")
    assert "only the text part of this model is used: 2 tensors of visual and mtp are skipped" in written.notes
    export_model(text, tmp_path / "text.gguf", "f16")
    (_, found), (_, expected) = read(tmp_path / "whole.gguf"), read(tmp_path / "text.gguf")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name].data, expected[name].data) for name in found)


def test_a_layer_that_predicts_is_passed_over(device: Device, tmp_path: Path) -> None:
    """As in files of llama.cpp's converter, which counts it among the blocks."""
    model = made(tmp_path / "model", layer_types=TYPES[:2] + TYPES[1:2])
    export_model(model, tmp_path / "m.gguf", "f16")
    facts = {"qwen35.nextn_predict_layers": 1, "qwen35.attention.recurrent_layers": [True, False, False]}
    changed(tmp_path / "m.gguf", tmp_path / "mtp.gguf", facts)
    assert config_of(tmp_path / "mtp.gguf").num_hidden_layers == 2
    # The model without its last layer.
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": TYPES[:2]}))
    assert_same_logits(device, tmp_path / "mtp.gguf", model)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ssm.inner_size": 47}, "is not a multiple of qwen35.ssm.time_step_rank 6"),
        ({"ssm.inner_size": None}, "does not state qwen35.ssm.inner_size"),
        ({"ssm.time_step_rank": 0}, "is not a multiple of qwen35.ssm.time_step_rank 0"),
        ({"ssm.group_count": 4}, "linear_num_value_heads 6 .* is not a multiple of linear_num_key_heads 4"),
        ({"ssm.conv_kernel": 9}, "linear_conv_kernel_dim"),
        ({"ssm.state_size": 1.5}, "linear_key_head_dim"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"attention.recurrent_layers": [True]}, "recurrent_layers .* is not an array of 3 numbers"),
        ({"attention.recurrent_layers": 3}, "recurrent_layers .* is not an array"),
        ({"nextn_predict_layers": 3}, "nextn_predict_layers .* expected 0 or 1"),
        ({"rope.dimension_count": 7}, "rotates 7 of the 32 values"),
        ({"block_count": 2.5}, "num_hidden_layers"),
    ],
)
def test_impossible_metadata(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    export_model(made(tmp_path / "model"), tmp_path / "m.gguf", "f16")
    stated = {f"qwen35.{key}": value for key, value in changes.items()}
    with pytest.raises(UserError, match=said):
        config_of(changed(tmp_path / "m.gguf", tmp_path / "bad.gguf", stated))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"linear_value_head_dim": 32}, "keys of 16 and values of 32 in its delta nets"),
        ({"rms_norm_eps": 1e-5}, "an rms_norm_eps of 1e-05"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        export_model(made(tmp_path / "model", **changes), tmp_path / "m.gguf", "f16")


def test_rates_that_are_no_numbers_are_found(tmp_path: Path, device: Device) -> None:
    model = make_model(tmp_path / "model", {"model_type": "qwen3_5_text", **STATED, "num_hidden_layers": 1})
    export_model(model, tmp_path / "m.gguf", "f16")
    path = tmp_path / "m.gguf"
    (rate,) = (tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ssm_a")
    with path.open("r+b") as file:
        file.seek(int(rate.data_offset))
        file.write(np.float32(0.5).tobytes())
    with pytest.raises(UserError, match="A_log"):
        open_model(str(path), device, "f32").load_weights()


def test_extreme_rates(tmp_path: Path, device: Device) -> None:
    """A decay rate that is zero in float32 has no logarithm, but one of the smallest number decays nothing either."""
    model = made(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    rates = weights[f"{NET}.A_log"].astype(np.float32)
    for last, name in ((-200.0, "slow"), (200.0, "fast")):
        rates[-1] = last
        save_file(weights | {f"{NET}.A_log": rates}, model / "model.safetensors", metadata={"format": "pt"})
        if name == "slow":
            export_model(model, tmp_path / "slow.gguf", "f16")
            assert_same_logits(device, tmp_path / "slow.gguf", model)
        else:
            with pytest.raises(UserError, match="A_log has values that are too large for a GGUF file"):
                export_model(model, tmp_path / "fast.gguf", "f16")
            assert not (tmp_path / "fast.gguf").exists()


def test_rates_stay_in_float32(tmp_path: Path) -> None:
    """Where the model has them so beside matrices of 16 bits."""
    model = made(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    mixed = weights | {f"{NET}.A_log": np.float32([1.2345678] * 6)}
    adapter = make_adapter(tmp_path / "adapter", model)
    save_file(mixed, model / "model.safetensors", metadata={"format": "pt"})
    merge_adapter(model, adapter, tmp_path / "merged", "bf16")
    with safe_open(tmp_path / "merged" / "model.safetensors", "np") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        np.testing.assert_array_equal(file.get_tensor(f"{NET}.A_log"), mixed[f"{NET}.A_log"])
    assert kinds.pop(f"{NET}.A_log") == "F32"
    assert set(kinds.values()) == {"BF16"}
