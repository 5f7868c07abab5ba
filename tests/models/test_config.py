"""config.json, as transformers 5 and earlier versions wrote it, becomes one ModelConfig, or a clear refusal."""

import json
from dataclasses import replace

import numpy as np
import pytest
from support import MODELS
from support.configs import BASE, config

from wgpu_lora.errors import UserError
from wgpu_lora.models.architectures import load_config, parse_config
from wgpu_lora.models.rotary_embedding import attention_factor, inv_freq

LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


WINDOWS = {"qwen2": (None,) * 3, "qwen3": (None, 5), "llama": (None, None), "mistral": (6, 6), "smollm3": (None, 5)}
WINDOWS |= {
    "phi3": (8, 8),
    "gemma2": (5, None),
    "gemma3_text": (5, None, 5),
    "gemma3": (5, None),
    "ministral": (4, None),
    "ministral3": (None,) * 2,
}


@pytest.mark.parametrize("architecture", WINDOWS)
def test_fixture_models_load(architecture):
    loaded = load_config(MODELS / architecture)
    assert loaded.architecture == architecture
    assert loaded.qk_norm == (architecture in ("qwen3", "gemma3_text", "gemma3"))
    assert loaded.attention_bias == (architecture in ("qwen2", "llama"))
    assert loaded.attention_output_bias == (architecture == "llama")
    assert loaded.sliding_windows == WINDOWS[architecture]


def test_fields_and_defaults():
    c = config()
    assert (c.head_dim, c.rope_theta, c.rope_scaling, c.eos_token_ids) == (8, 10000.0, None, (5, 6))
    assert not c.tie_word_embeddings
    assert parse_config({k: v for k, v in BASE.items() if k != "num_key_value_heads"}).num_key_value_heads == 4
    assert config(model_type="qwen3").head_dim == 128
    assert config(model_type="mistral").sliding_windows == (4096,) * 3
    assert config(model_type="mistral", sliding_window=None).sliding_windows == (None,) * 3


def test_old_and_new_rope_fields_agree():
    old = config(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}, torch_dtype="bfloat16")
    new = config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, dtype="bfloat16")
    assert old == new
    assert new.rope_theta == 5e5


def test_sliding_windows_of_qwen():
    def windows(**changes):
        return config(model_type="qwen2", sliding_window=16, **changes).sliding_windows

    assert windows() == (None, None, None)
    assert windows(use_sliding_window=True, max_window_layers=2) == (None, None, 16)
    assert windows(use_sliding_window=True) == (None, None, None)  # 28 layers keep full attention by default
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(use_sliding_window=True, layer_types=types) == (16, None, 16)


def test_parameter_shapes():
    shapes = config(tie_word_embeddings=True, attention_bias=True, head_dim=10).parameter_shapes()
    assert shapes["model.layers.2.self_attn.q_proj.weight"] == (40, 32)
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == (20,)
    assert shapes["model.layers.0.self_attn.o_proj.bias"] == (32,)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (32, 64)
    assert "lm_head.weight" not in shapes
    assert "model.layers.0.mlp.up_proj.bias" not in shapes
    assert config().parameter_shapes()["lm_head.weight"] == (100, 32)
    assert "model.layers.0.self_attn.o_proj.bias" not in config(model_type="qwen2").parameter_shapes()
    assert config(model_type="qwen3").parameter_shapes()["model.layers.0.self_attn.q_norm.weight"] == (128,)


def test_load_joins_the_end_tokens_of_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 9]}')
    assert load_config(tmp_path).eos_token_ids == (5, 6, 9)


def test_inv_freq_formulas():
    plain = inv_freq(config())
    np.testing.assert_allclose(plain, 10000.0 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(inv_freq(config(rope_scaling={"type": "linear", "factor": 2})), plain / 2)
    scaled = inv_freq(config(rope_scaling={"rope_type": "llama3", **LLAMA3}))
    assert scaled[0] == plain[0]  # 10 turns in 64 tokens: a short wave, kept
    assert scaled[2] == plain[2] / 4  # 0.1 turns: a long one, stretched
    turns = 64 * plain[1] / (2 * np.pi)  # 1.02: between 1 and 4
    keep = (turns - 1) / 3
    np.testing.assert_allclose(scaled[1], plain[1] * (keep + (1 - keep) / 4))


def test_fields_at_their_default_are_not_in_the_digest():
    # of the time before partial_rotary_factor
    assert config().digest() == "469aab88756eee2f70ee43b90bc3ef133da7e1a1b8c9d50bb6d538e9e2e17732"
    assert replace(config(), partial_rotary_factor=0.5).digest() != config().digest()


def test_yarn():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 8}
    c = config(rope_scaling=rope)
    assert attention_factor(c) == pytest.approx(0.1 * np.log(4) + 1)
    assert attention_factor(config(rope_scaling={**rope, "attention_factor": 0.5})) == 0.5
    assert attention_factor(config()) == 1
    assert inv_freq(c)[-1] == pytest.approx(inv_freq(config())[-1] / 4)
    assert inv_freq(c)[0] == inv_freq(config())[0]


@pytest.mark.reference
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
            "beta_fast": 16,
        },
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
        },
    ],
)
def test_rope_matches_transformers(rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = {**BASE, "head_dim": 64, "rope_parameters": {"rope_theta": 5e5, **rope}}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**fields))
    ours = parse_config(fields)
    np.testing.assert_allclose(inv_freq(ours), theirs.inv_freq.numpy(), rtol=2e-6)
    assert attention_factor(ours) == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' in here.json is not supported: use one of qwen2, qwen3"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' .* because mixtures of experts are not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "stored as 'gptq'.*unquantised checkpoint"),
        ({"hidden_size": None}, "hidden_size is missing from here.json"),
        ({"hidden_size": 0}, "hidden_size in here.json is 0, expected a whole number from 1 to 131,072"),
        ({"num_hidden_layers": True}, "num_hidden_layers in here.json is True"),
        ({"vocab_size": "many"}, "vocab_size in here.json is 'many'"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 34}, "hidden_size 34 .* not a multiple of num_attention_heads 4"),
        ({"head_dim": 7}, "head_dim 7 .* is odd"),
        ({"rms_norm_eps": -1}, "rms_norm_eps in here.json is -1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings in here.json is 'no'"),
        ({"eos_token_id": -2}, "eos_token_id in here.json is -2"),
        ({"rope_theta": 0}, "rope_theta in here.json is 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type 'dynamic'.*default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope factor is missing from here.json"),
        ({"rope_scaling": "linear"}, "rope_scaling in here.json is 'linear', expected an object"),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "must be greater than low_freq_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"sliding_window": 8}, "sliding_window in here.json is not supported for llama"),
        ({"layer_types": ["full_attention"]}, "must list 3 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types in .* has 'chunked_attention'"),
        ({"layer_types": ["sliding_attention"] * 3}, "no sliding_window is set"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, "mixes attention kinds"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias = true .* for mistral"),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias = true .* for qwen2"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(UserError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "config.json does not exist"), ("{", "cannot be read as JSON"), ("[]", "JSON list, expected an object")],
)
def test_load_names_the_file(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(tmp_path)
