"""GGUF files of every kind of architecture: what is written is read again, in the order in which llama.cpp has it."""

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
from support.gguf_models import changed, make_adapter, read, small, values
from support.models import full_logits
from support.sampling import sample

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.architectures import load_config
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.export.adapter_merge import merge_adapter
from wgpu_lora.models.export.gguf_export import export_adapter, export_model
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.models.model_files import config_of, read_model

GEMMA: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 32}
GEMMA |= {"query_pre_attn_scalar": 32, "sliding_window": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN16 = {**YARN, "original_max_position_embeddings": 16}
MINISTRAL = {"head_dim": 16, "rope_parameters": {**YARN16, "llama_4_scaling_beta": 0.3}}
ALIKE = {"mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
PHI = {"tie_word_embeddings": False, "original_max_position_embeddings": 16, "sliding_window": 12}
DELTA: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16}
DELTA |= {"linear_value_head_dim": 16, "head_dim": 32, "rope_theta": 1e4, "tie_word_embeddings": True}
TYPES = ["linear_attention", "full_attention", "linear_attention"]
QWEN35 = {**DELTA, "num_hidden_layers": 3, "layer_types": TYPES}
NET = "model.layers.0.linear_attn"
# Of each model: its architecture, what its config states, llama.cpp's name, and some of the file's metadata.
MODELS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "gemma2": ("gemma2", GEMMA, "gemma2", {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0}),
    "gemma3": ("gemma3_text", GEMMA, "gemma3", {"attention.sliding_window": 16, "attn_logit_softcapping": None}),
    "phi": ("phi3", {"rope_parameters": LONGROPE, **PHI}, "phi3", {"rope.dimension_count": 12}),
    "linear": (
        "qwen2",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "qwen2",
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    ),
    "yarn": (
        "qwen3",
        {"rope_parameters": {**YARN16, "attention_factor": None}},
        "qwen3",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": None},
    ),
    "yarn with a factor": (
        "qwen3",
        {"rope_parameters": {**YARN16, "attention_factor": 1.5}},
        "qwen3",
        {"rope.scaling.attn_factor": 1.5 / (1 + 0.1 * np.log(4)), "rope.scaling.original_context_length": 16},
    ),
    "ministral3": (
        "ministral3",
        {**MINISTRAL, "rope_parameters": MINISTRAL["rope_parameters"] | ALIKE},
        "mistral3",
        {"attention.temperature_scale": 0.3, "rope.scaling.original_context_length": 16},
    ),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, "llama", {}),
    "mistral": ("mistral", {"tie_word_embeddings": False}, "llama", {"attention.sliding_window": 4096}),
    "smollm3": ("smollm3", {}, "smollm3", {}),
    "qwen35": (
        "qwen3_5_text",
        QWEN35,
        "qwen35",
        {"rope.dimension_count": 8, "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 2}
        | {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6}
        | {"ssm.inner_size": 96},
    ),
    "qwen35 untied": ("qwen3_5_text", {**QWEN35, "tie_word_embeddings": False}, "qwen35", {}),
}


def make_model(directory: Path, name: str, **stated: Any) -> Path:
    return small(directory, MODELS[name][0], **{**MODELS[name][1], **stated})


def logits(path: Path, device: Device) -> np.ndarray:
    model = open_model(str(path), device, "f32")
    model.load_weights()
    return full_logits(model, [Segment(np.arange(5, 29))])[0]


def assert_same_logits(device: Device, actual: Path, expected: Path, share: float = 1e-5) -> None:
    theirs = logits(expected, device)
    np.testing.assert_allclose(logits(actual, device), theirs, rtol=0, atol=share * np.abs(theirs).max())


def assert_same_config(actual: ModelConfig, expected: ModelConfig) -> None:
    """But for the rounding of rope's numbers to float32, and for the ends that the tokenizer states."""
    scaling = actual.rope_scaling
    if scaling is not None:
        assert scaling.attention_factor == pytest.approx(expected.rope_scaling.attention_factor, rel=1e-6)
        numbers = {"attention_factor": expected.rope_scaling.attention_factor}
        if hasattr(scaling, "factors"):
            np.testing.assert_allclose(scaling.factors, expected.rope_scaling.factors, rtol=1e-6)
            numbers["factors"] = expected.rope_scaling.factors
        scaling = replace(scaling, **numbers)
    assert replace(actual, eos_token_ids=expected.eos_token_ids, rope_scaling=scaling) == expected


@pytest.mark.parametrize("name", sample([*MODELS], 1 / 3))
def test_exported_and_read_back(device: Device, tmp_path: Path, name: str) -> None:
    """The same config and logits; what an adapter is merged into, from either form, is the same too."""
    _, _, theirs, stated = MODELS[name]
    model, file = make_model(tmp_path / "model", name), tmp_path / "f16.gguf"
    export_model(model, file, "f16")
    facts, _ = read(file)
    assert facts["general.architecture"] == theirs
    for key, value in stated.items():
        assert facts.get(f"{theirs}.{key}") == (pytest.approx(value) if isinstance(value, float) else value), key
    assert_same_config(config_of(file), load_config(model))
    assert_same_logits(device, file, model)
    adapter = make_adapter(tmp_path / "adapter", model)
    for source, output in ((model, "a"), (file, "b")):
        merge_adapter(source, adapter, tmp_path / output, "f32")
    assert_same_logits(device, tmp_path / "b", tmp_path / "a")
    export_model(model, tmp_path / "merged.gguf", "f16", adapter)
    assert_same_logits(device, tmp_path / "merged.gguf", tmp_path / "a", 3e-3)  # of f16


def test_rope_and_norms_as_tensors(device: Device, tmp_path: Path) -> None:
    llama = small(tmp_path / "llama", "llama", rope_parameters=LLAMA3)
    exported: dict[str, dict[str, Any]] = {}
    for model in (llama, make_model(tmp_path / "phi", "phi"), make_model(tmp_path / "gemma2", "gemma2")):
        export_model(model, tmp_path / f"{model.name}.gguf", "f16")
        exported[model.name] = read(tmp_path / f"{model.name}.gguf")[1]
    assert_same_logits(device, tmp_path / "llama.gguf", llama)
    factors = values(exported["llama"]["rope_freqs.weight"])
    assert (factors[0], factors[-1]) == (1.0, 4.0)  # of the fastest pair, and the config's factor of the slowest
    assert (np.diff(factors) >= 0).all()
    stored_values = values(exported["phi"]["rope_factors_long.weight"])
    np.testing.assert_array_equal(stored_values, np.float32(LONGROPE["long_factor"]))
    stored = load_file(model / "model.safetensors")["model.layers.1.post_feedforward_layernorm.weight"]
    stored_values = values(exported["gemma2"]["blk.1.post_ffw_norm.weight"])
    np.testing.assert_array_equal(stored_values, stored.astype(np.float32) + 1)


def test_ministral3_as_the_converter_states_it(device: Device, tmp_path: Path) -> None:
    """Yarn's factor as a multiplier."""
    model, file = make_model(tmp_path / "model", "ministral3"), tmp_path / "f16.gguf"
    export_model(model, file, "f16")
    stated = {"mistral3.rope.scaling.yarn_log_multiplier": 1.0, "mistral3.rope.scaling.attn_factor": None}
    converted = changed(file, tmp_path / "converted.gguf", stated)
    assert_same_config(config_of(converted), load_config(model))
    assert_same_logits(device, converted, model)
    stated["mistral3.rope.scaling.yarn_log_multiplier"] = float(-10 / np.log(4.0))  # a factor of 0, to be divided by
    with pytest.raises(UserError, match=r"yarn_log_multiplier in .* must not be negative"):
        config_of(changed(file, tmp_path / "negative.gguf", stated))


@pytest.mark.parametrize(
    ("architecture", "stated", "note_text"),
    [
        ("mistral", {"sliding_window": 7}, "up to 7 tokens are exact"),
        ("ministral3", {**MINISTRAL, "sliding_window": 9}, "ignores this model's sliding window of 9"),
        ("phi3", {"rope_parameters": LONGROPE, **PHI}, "context of up to 16 tokens"),
        ("qwen2", {"use_sliding_window": False}, ""),
    ],
)
def test_what_llama_cpp_ignores_is_said(tmp_path: Path, architecture: str, stated: dict, note_text: str) -> None:
    model = small(tmp_path / "model", architecture, **stated)
    notes = export_model(model, tmp_path / "m.gguf").notes
    assert any(note_text in note for note in notes) == bool(note_text)
    assert config_of(tmp_path / "m.gguf").sliding_windows == load_config(model).sliding_windows


@pytest.mark.parametrize(
    ("architecture", "whole", "prefix", "more", "skipped"),
    [
        ("mistral", "mistral3", ("", "language_model."), ["vision_tower.w"], "1 tensor"),
        ("qwen3_5_text", "qwen3_5", ("model.", "model.language_model."), ["model.visual.blocks.0.w", "mtp.fc.weight"],
         "2 tensors of visual and mtp are skipped"),
    ],
)  # fmt: skip
def test_a_model_with_a_vision_tower(
    tmp_path: Path, architecture: str, whole: str, prefix: tuple[str, str], more: list[str], skipped: str
) -> None:
    """Its language model is written, and it is said that the rest is not."""
    untied = {"sliding_window": None, "tie_word_embeddings": False}
    text = small(tmp_path / "text", architecture, **(untied if architecture == "mistral" else QWEN35))
    config = json.loads((text / "config.json").read_text())
    (tmp_path / "whole").mkdir()
    stated = {"model_type": whole, "text_config": config, "vision_config": {}}
    stated["tie_word_embeddings"] = config["tie_word_embeddings"]
    (tmp_path / "whole" / "config.json").write_text(json.dumps(stated))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "whole" / file).write_bytes((text / file).read_bytes())
    stored = load_file(text / "model.safetensors")
    tensors = {name.replace(*prefix, 1): tensor for name, tensor in stored.items()}
    tensors |= {name: np.zeros((2, 2), np.float32) for name in more}
    save_file(tensors, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    (note,) = export_model(tmp_path / "whole", tmp_path / "whole.gguf", "f16").notes
    assert "only the text part of this model is used" in note
    assert skipped in note
    export_model(text, tmp_path / "text.gguf", "f16")
    (_, actual), (_, expected) = read(tmp_path / "whole.gguf"), read(tmp_path / "text.gguf")
    assert actual.keys() == expected.keys()
    assert all(np.array_equal(actual[name].data, expected[name].data) for name in actual)
    assert_same_config(config_of(tmp_path / "whole.gguf"), load_config(text))


L3 = {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("qwen3", {"attention_bias": True}, "a bias of o_proj, which llama.cpp's qwen3"),
        ("qwen2", {"head_dim": 32}, "widths sum to 128 beside a hidden size of 64"),
        ("qwen2", {"rope_parameters": L3}, "the rope type llama3"),
        ("llama", {"rope_parameters": {**L3, "rope_type": "yarn", "truncate": False}}, "yarn without truncate"),
        ("gemma2", {**GEMMA, "query_pre_attn_scalar": 7}, "a query_pre_attn_scalar of 7"),
        ("gemma2", {**GEMMA, "final_logit_softcapping": None}, "no soft caps"),
        ("gemma2", {**GEMMA, "tie_word_embeddings": False}, "an LM head of its own"),
        ("gemma2", {**GEMMA, "layer_types": ["full_attention"] * 2}, "full attention in other layers than every 2th"),
        ("gemma3_text", {**GEMMA, "final_logit_softcapping": 30.0}, "a soft cap of its logits"),
        ("gemma3_text", {**GEMMA, "rope_local_base_freq": 5e3}, "rotary embedding of its own"),
        ("smollm3", {"no_rope_layer_interval": 2}, "layers without positions other than every 4th"),
        ("smollm3", {"mlp_bias": True}, "has biases"),
        ("qwen3_5_text", {**QWEN35, "linear_value_head_dim": 32}, "keys of 16 and values of 32 in its delta nets"),
        ("qwen3_5_text", {**QWEN35, "rms_norm_eps": 1e-5}, "an rms_norm_eps of 1e-05"),
    ],
)
def test_what_llama_cpp_cannot_compute(tmp_path: Path, architecture: str, changes: dict, reason: str) -> None:
    model = small(tmp_path / "model", architecture, **changes)
    adapter = make_adapter(tmp_path / "adapter", model)
    with pytest.raises(UserError, match=reason):
        export_model(model, tmp_path / "out.gguf", "f16")
    with pytest.raises(UserError, match=reason):
        export_adapter(model, adapter, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


# -- delta nets --------------------------------------------------------------------------------------------------------


def test_delta_nets_in_the_order_of_llama_cpp(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen35")
    adapter = make_adapter(tmp_path / "adapter", model)
    export_model(model, tmp_path / "m.gguf", "f16")
    export_adapter(model, adapter, tmp_path / "lora.gguf")
    tensors = {name: values(tensor) for name, tensor in read(tmp_path / "m.gguf")[1].items()}
    stored = {name: tensor.astype(np.float32) for name, tensor in load_file(model / "model.safetensors").items()}
    order, taps = [0, 3, 1, 4, 2, 5], stored[f"{NET}.conv1d.weight"][:, 0]
    np.testing.assert_allclose(tensors["blk.0.ssm_a"], -np.exp(stored[f"{NET}.A_log"])[order], rtol=1e-6)
    for name, expected in {
        "blk.0.ssm_dt.bias": stored[f"{NET}.dt_bias"][order],
        "blk.0.ssm_norm.weight": stored[f"{NET}.norm.weight"],
        # of q and k, and of the values by heads
        "blk.0.ssm_conv1d.weight": np.concatenate([taps[:64], taps[64:].reshape(6, 16, 4)[order].reshape(96, 4)]),
        "blk.1.post_attention_norm.weight": stored["model.layers.1.post_attention_layernorm.weight"] + 1,
    }.items():
        np.testing.assert_array_equal(tensors[name], expected)
    out = load_file(adapter / "adapter_model.safetensors")[f"base_model.model.{NET}.out_proj.lora_A.weight"]
    factor = values(read(tmp_path / "lora.gguf")[1]["blk.0.ssm_out.weight.lora_a"])
    np.testing.assert_array_equal(factor, out.reshape(-1, 2, 3, 16).swapaxes(1, 2).reshape(out.shape))


def test_quantised_delta_nets_are_decoded_first(tmp_path: Path) -> None:
    """As their columns are in another order."""
    model = make_model(tmp_path / "model", "qwen35")
    export_model(model, tmp_path / "m.gguf", "q8_0")
    checkpoint = read_model(tmp_path / "m.gguf").checkpoint
    stored = load_file(model / "model.safetensors")
    for name, rows in ((f"{NET}.out_proj.weight", (3, 40)), (f"{NET}.in_proj_qkv.weight", (60, 99))):
        whole = checkpoint.read_f32(name)
        assert 0 < np.abs(whole - stored[name]).max() < 0.01
        np.testing.assert_array_equal(checkpoint.read_f32(name, *rows), whole[slice(*rows)])
        np.testing.assert_array_equal(checkpoint.read_raw(name, *rows).view(np.float32), whole[slice(*rows)])


@pytest.mark.parametrize(("kinds", "regular"), [("LLL", True), ("FFF", True), ("LFL", True), ("FLF", False)])
def test_layers_in_any_order(tmp_path: Path, kinds: str, regular: bool) -> None:
    model = make_model(
        tmp_path / "model", "qwen35", layer_types=[{"L": TYPES[0], "F": TYPES[1]}[kind] for kind in kinds]
    )
    export_model(model, tmp_path / "m.gguf", "f16")
    facts, _ = read(tmp_path / "m.gguf")
    assert ("qwen35.attention.recurrent_layers" in facts) != regular
    assert config_of(tmp_path / "m.gguf").linear_layers == load_config(model).linear_layers  # type: ignore[attr-defined]


def test_a_layer_that_predicts_is_passed_over(device: Device, tmp_path: Path) -> None:
    """As in files of llama.cpp's converter, which counts it among the blocks."""
    model = make_model(tmp_path / "model", "qwen35", layer_types=TYPES[:2] + TYPES[1:2])
    export_model(model, tmp_path / "m.gguf", "f16")
    facts = {"qwen35.nextn_predict_layers": 1, "qwen35.attention.recurrent_layers": [True, False, False]}
    changed(tmp_path / "m.gguf", tmp_path / "mtp.gguf", facts)
    assert config_of(tmp_path / "mtp.gguf").num_hidden_layers == 2
    # The model without its last layer.
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": TYPES[:2]}))
    assert_same_logits(device, tmp_path / "mtp.gguf", model)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen35")
    export_model(make_model(directory / "model", "qwen35"), directory / "m.gguf", "f16")
    return directory / "m.gguf"


@pytest.mark.parametrize(
    ("changes", "message"),
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
def test_impossible_metadata(exported: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    stated = {f"qwen35.{key}": value for key, value in changes.items()}
    with pytest.raises(UserError, match=message):
        config_of(changed(exported, tmp_path / "bad.gguf", stated))


def test_rates_that_are_no_numbers_are_found(exported: Path, tmp_path: Path, device: Device) -> None:
    data = bytearray(exported.read_bytes())
    (rate,) = (tensor for tensor in gguf.GGUFReader(exported).tensors if tensor.name == "blk.0.ssm_a")
    data[rate.data_offset : rate.data_offset + 4] = np.float32(0.5).tobytes()
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(UserError, match="A_log"):
        open_model(str(tmp_path / "m.gguf"), device, "f32").load_weights()


def test_extreme_rates(tmp_path: Path, device: Device) -> None:
    """A decay rate that is zero in float32 has no logarithm, but one of the smallest number decays nothing either."""
    model = make_model(tmp_path / "model", "qwen35")
    stored = load_file(model / "model.safetensors")
    for last in (-200.0, 200.0):
        stored[f"{NET}.A_log"][-1] = last
        save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
        if last < 0:
            export_model(model, tmp_path / "slow.gguf", "f16")
            assert_same_logits(device, tmp_path / "slow.gguf", model)
    with pytest.raises(UserError, match="A_log has values that are too large for a GGUF file"):
        export_model(model, tmp_path / "fast.gguf", "f16")
    assert not (tmp_path / "fast.gguf").exists()


@pytest.mark.parametrize("base_dtype", ["nf4", "bf16"])
def test_weights_that_are_rounded_a_second_time_are_said(tmp_path: Path, base_dtype: str) -> None:
    model = small(tmp_path / "model", "qwen2")
    adapter = make_adapter(tmp_path / "adapter", model)
    (adapter / "run.json").write_text(json.dumps({"options": {"base_dtype": base_dtype}}))
    notes = export_model(model, tmp_path / "m.gguf", "q8_0", adapter).notes
    assert any("was trained beside weights in nf4" in note for note in notes) == (base_dtype == "nf4")


def test_rates_stay_in_float32(tmp_path: Path) -> None:
    """Where the model has them so beside matrices of 16 bits."""
    model = make_model(tmp_path / "model", "qwen35")
    rates = np.float32([1.2345678] * 6)
    save_file(load_file(model / "model.safetensors") | {f"{NET}.A_log": rates}, model / "model.safetensors")
    merge_adapter(model, make_adapter(tmp_path / "adapter", model), tmp_path / "merged", "bf16")
    with safe_open(tmp_path / "merged" / "model.safetensors", "np") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        np.testing.assert_array_equal(file.get_tensor(f"{NET}.A_log"), rates)
    assert kinds.pop(f"{NET}.A_log") == "F32"
    assert set(kinds.values()) == {"BF16"}
