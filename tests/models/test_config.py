"""config.json, as transformers 5 and earlier versions wrote it, becomes one ModelConfig, or a clear refusal."""

import json
from dataclasses import replace

import numpy as np
import pytest
from support import MODELS

from wgpu_lora.errors import UserError
from wgpu_lora.models.architectures import ARCHITECTURES, load_config, parse_config
from wgpu_lora.models.rotary_embedding import attention_factor, inv_freq
from wgpu_lora.models.row_inputs import Rows

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [5, 6],
}
SIZED = {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 10}
LINEAR = {"type": "linear", "factor": 2.0}
LONG = {"type": "su", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 7.0]}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def config(**changes):
    return parse_config({**BASE, **changes}, "here.json")


WINDOWS = {"qwen2": (None,) * 3, "qwen3": (None, 5), "llama": (None, None), "mistral": (6, 6), "smollm3": (None, 5)}
WINDOWS |= {
    "phi3": (8, 8),
    "gemma2": (5, None),
    "gemma3_text": (5, None, 5),
    "gemma3": (5, None),
    "ministral": (4, None),
    "ministral3": (None,) * 2,
}


QK_NORMS, BIASED = ("qwen3", "gemma3_text", "gemma3"), ("qwen2", "llama")


@pytest.mark.parametrize("architecture", WINDOWS)
def test_fixture_models_load(architecture):
    loaded = load_config(MODELS / architecture)
    assert (loaded.architecture, loaded.sliding_windows) == (architecture, WINDOWS[architecture])
    assert (loaded.qk_norm, loaded.attention_bias) == (architecture in QK_NORMS, architecture in BIASED)
    assert loaded.attention_output_bias == (architecture == "llama")


SLIDING, FULL = "sliding_attention", "full_attention"
Q2, S3 = {"model_type": "qwen2", "sliding_window": 16}, {"model_type": "smollm3", "num_hidden_layers": 4}
G2, G3 = {"model_type": "gemma2"}, {"model_type": "gemma3_text"}
USUAL = (True, True, True, False)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {"head_dim": 8, "rope_theta": 1e4, "rope_scaling": None, "eos_token_ids": (5, 6)}),
        ({}, {"tie_word_embeddings": False}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": 4}),
        ({"model_type": "qwen3"}, {"head_dim": 128}),
        ({"model_type": "mistral"}, {"sliding_windows": (4096,) * 3}),
        ({"model_type": "mistral", "sliding_window": None}, {"sliding_windows": (None,) * 3}),
        ({"model_type": "ministral", "layer_types": [FULL, FULL, SLIDING]}, {"sliding_windows": (None, None, 4096)}),
        (Q2, {"sliding_windows": (None,) * 3}),
        ({**Q2, "use_sliding_window": True, "max_window_layers": 2}, {"sliding_windows": (None, None, 16)}),
        ({**Q2, "use_sliding_window": True}, {"sliding_windows": (None,) * 3}),  # 28 layers keep full attention
        (
            {**Q2, "use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING]},
            {"sliding_windows": (16, None, 16)},
        ),
        (S3, {"rotated_layers": USUAL, "sliding_windows": (None,) * 4, "tie_word_embeddings": True}),
        ({**S3, "sliding_window": 7}, {"rotated_layers": USUAL, "sliding_windows": (None,) * 4}),
        ({**S3, "sliding_window": 7, "use_sliding_window": True}, {"sliding_windows": (None, None, None, 7)}),
        ({**S3, "no_rope_layer_interval": 2}, {"rotated_layers": (True, False) * 2}),
        ({**S3, "no_rope_layers": [0, 1, 1, 1]}, {"rotated_layers": (False, True, True, True)}),
        (G2, {"attention_cap": 50, "final_cap": 30, "sliding_windows": (4096, None, 4096), "head_dim": 256}),
        (G2, {"tie_word_embeddings": True, "query_pre_attn_scalar": 256}),
        ({**G2, "attn_logit_softcapping": None}, {"attention_cap": 0}),
        ({**G3, "num_hidden_layers": 12}, {"sliding_windows": ((4096,) * 5 + (None,)) * 2}),
        ({**G3, "sliding_window_pattern": 3, "sliding_window": 7}, {"sliding_windows": (7, 7, None)}),
        (G3, {"attention_cap": 0, "final_cap": 0, "rope_theta": 1e6, "rope_scaling": None}),
        (G3, {"local_rope_theta": 1e4, "local_rope_scaling": None}),
        ({"model_type": "phi3"}, {"rope_scaling": None}),
    ],
)
def test_fields_and_defaults(changes, fields):
    c = config(**changes)
    assert {name: getattr(c, name) for name in fields} == fields


def test_old_and_new_rope_fields_agree():
    old = config(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}, torch_dtype="bfloat16")
    new = config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, dtype="bfloat16")
    assert old == new
    assert new.rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "name", "shape"),
    [
        (SIZED, "model.layers.2.self_attn.q_proj.weight", (40, 32)),
        (SIZED, "model.layers.0.self_attn.k_proj.bias", (20,)),
        (SIZED, "model.layers.0.self_attn.o_proj.bias", (32,)),
        (SIZED, "model.layers.0.mlp.down_proj.weight", (32, 64)),
        (SIZED, "lm_head.weight", None),
        (SIZED, "model.layers.0.mlp.up_proj.bias", None),
        ({}, "lm_head.weight", (100, 32)),
        ({"model_type": "qwen2"}, "model.layers.0.self_attn.o_proj.bias", None),
        ({"model_type": "qwen3"}, "model.layers.0.self_attn.q_norm.weight", (128,)),
    ],
)
def test_parameter_shapes(changes, name, shape):
    assert config(**changes).parameter_shapes().get(name) == shape


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
        ({"model_type": "gemma3", "text_config": None}, "text_config is missing from here.json"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "bert"}},
            "model_type 'bert', which is not supported in gemma3",
        ),
        ({"model_type": "gemma3n"}, "'gemma3n' .* per-layer embeddings, alternating updates and shared caches"),
        ({"model_type": "gemma4_text"}, "'gemma4_text' .* caches that layers share"),
        (
            {"model_type": "ministral3", "rope_parameters": {"rope_type": "default"}},
            "llama_4_scaling_beta is missing from here.json",
        ),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"model_type": "gemma2", "final_logit_softcapping": 0}, "final_logit_softcapping in here.json is 0"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar in here.json is 0"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping .* transformers ignores",
        ),
        ({"model_type": "gemma3_text", "rope_parameters": LINEAR}, "rope_parameters .* must be by kind of layer"),
        (
            {"model_type": "phi3", "rope_scaling": LONG, "original_max_position_embeddings": 0.5},
            "original_max_position_embeddings in here.json is 0.5",
        ),
        ({"model_type": "phi3", "rope_scaling": LINEAR}, "rope_type 'linear' in here.json .* default or longrope"),
        ({"model_type": "phi3", "rope_scaling": {**LONG, "long_factor": [1]}}, "long_factor .* must list 4 numbers"),
        (
            {"model_type": "phi3", "rope_scaling": {**LONG, "short_factor": [1, 2, 3, 0]}},
            "short_factor in here.json is 0",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers .* must list 3 layers"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 2]}, "no_rope_layers .* each 0 or 1"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval in here.json is 0"),
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


def test_gemma():
    two = config(model_type="gemma2")
    assert two.logit_cap() == 30
    scales = [config(model_type="gemma2", hidden_size=3072).embedding_scale(kind) for kind in ("f32", "bf16", "f16")]
    assert scales == [np.float32(3072**0.5), 55.5, 55.4375]
    assert two.parameters["model.norm.weight"].offset == 1
    assert {item.offset for name, item in two.parameters.items() if name.endswith("layernorm.weight")} == {1}
    assert config(**S3).cut(2).rotated_layers == (True, True)


def test_rotary_bases_of_gemma3():
    def configs_of(**changes):
        c = config(model_type="gemma3_text", **changes)
        return (c.rope_theta, c.rope_scaling), (c.local_rope_theta, c.local_rope_scaling)

    nested = {"full_attention": {"rope_theta": 5e5, **LINEAR}, "sliding_attention": {"rope_theta": 2e4}}
    earlier = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}
    assert configs_of(rope_parameters=nested) == configs_of(**earlier)
    assert configs_of(**earlier)[0][1].factor == 2
    assert configs_of(**earlier)[1] == (2e4, None)
    assert len(config(model_type="gemma3_text").tables()) == 2


def test_queries_of_ministral_are_scaled_by_position():
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 3, "llama_4_scaling_beta": 0.1}
    c = config(model_type="ministral3", rope_parameters=rope)
    plain, of_queries = (table.values(7) for table in c.tables())
    scale = 1 + 0.1 * np.log(1 + np.array([0, 0, 0, 1, 1, 1, 2]))
    np.testing.assert_allclose(of_queries, plain * scale[:, None, None], rtol=1e-6)
    whole = parse_config({"model_type": "mistral3", "text_config": {**BASE, "model_type": "mistral"}})
    assert (len(whole.tables()), whole.path(0)) == (1, "model.language_model.layers.0")
    plain = parse_config({**BASE, "model_type": "mistral"})  # whose defaults are others than ministral3's
    for name in ("head_dim", "rms_norm_eps", "rope_theta", "sliding_windows", "max_position_embeddings"):
        assert getattr(whole, name) == getattr(plain, name), name


def test_published_gemma3_with_images_leaves_out_defaults():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    c = parse_config({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text})
    assert (c.vocab_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (262208, 8, 4, 256)
    assert (c.eos_token_ids, c.tie_word_embeddings, c.rope_theta, c.rope_scaling.factor) == ((1, 106), True, 1e6, 8)
    assert "model.language_model.layers.33.self_attn.q_proj" in c.lora_modules


def test_longrope_has_two_tables_in_turns():
    c = config(model_type="phi3", rope_scaling=LONG, original_max_position_embeddings=128)
    plain, table = inv_freq(config()), c.tables()[0]
    factor = np.sqrt(1 + np.log(4) / np.log(128))
    assert attention_factor(c) == pytest.approx(factor)
    assert (c.switch(), c.longest_fork()) == (128, 128)
    values = table.values(3).reshape(3, 2, 4, 2)
    np.testing.assert_allclose(values[2, 0, :, 0], factor * np.cos(2 * plain / LONG["short_factor"]), rtol=1e-6)
    np.testing.assert_allclose(values[2, 1, :, 1], factor * np.sin(2 * plain / LONG["long_factor"]), rtol=1e-6)
    rows = Rows.causal(*np.arange(10).reshape(5, 2), lengths=np.array([128, 129]))
    assert list(table.table_rows.values(rows)) == [0, 3]


def test_partial_rotary_embedding():
    """Of an architecture that has it: the first values of a head, in pairs."""

    class Partial(ARCHITECTURES["qwen3"]):
        PARTIAL, THETA = 0.25, 5e3

    def parsed(**changes):
        return Partial.parse({**BASE, "head_dim": 24, **changes}, "here.json")

    assert parsed().rotary_dim == 6
    np.testing.assert_allclose(inv_freq(parsed()), 5000.0 ** (-np.arange(3) / 3))
    assert parsed(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.6}).rotary_dim == 14
    assert (table := parsed().tables()[0]).shape(7) == table.values(7).shape == (7, 3, 2)
    with pytest.raises(UserError, match="rotates 5 of the 24 values of a head"):
        parsed(partial_rotary_factor=0.24)
    with pytest.raises(UserError, match=r"partial_rotary_factor = 1.5 .* use at most 1"):
        parsed(partial_rotary_factor=1.5)
