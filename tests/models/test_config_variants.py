"""config.json of the architectures beyond those of `test_config.py`: what they add, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from support.configs import BASE, config

from wgpu_lora.errors import UserError
from wgpu_lora.models.architectures import ARCHITECTURES, parse_config
from wgpu_lora.models.rotary_embedding import attention_factor, inv_freq
from wgpu_lora.models.row_inputs import Rows

LINEAR = {"type": "linear", "factor": 2.0}
LONG = {"type": "su", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 7.0]}


def test_layers_of_smollm3_without_positions():
    def of(**changes):
        c = config(model_type="smollm3", num_hidden_layers=4, **changes)
        return c.rotated_layers, c.sliding_windows

    usual = (True, True, True, False)
    assert of() == of(sliding_window=7) == (usual, (None,) * 4)
    assert of(sliding_window=7, use_sliding_window=True) == (usual, (None, None, None, 7))
    assert of(no_rope_layer_interval=2)[0] == (True, False) * 2
    assert of(no_rope_layers=[0, 1, 1, 1])[0] == (False, True, True, True)
    assert config(model_type="smollm3").tie_word_embeddings
    assert config(model_type="smollm3", num_hidden_layers=4).cut(2).rotated_layers == (True, True)


def test_gemma():
    two, three = config(model_type="gemma2"), config(model_type="gemma3_text", num_hidden_layers=12)
    assert (two.attention_cap, two.final_cap, two.logit_cap()) == (50, 30, 30)
    assert (three.attention_cap, three.final_cap) == (0, 0)
    assert two.sliding_windows == (4096, None, 4096)
    assert three.sliding_windows == ((4096,) * 5 + (None,)) * 2
    assert two.tie_word_embeddings
    assert (two.head_dim, two.query_pre_attn_scalar) == (256, 256)
    assert config(model_type="gemma2", attn_logit_softcapping=None).attention_cap == 0
    assert config(model_type="gemma3_text", sliding_window_pattern=3, sliding_window=7).sliding_windows == (7, 7, None)
    scales = [config(model_type="gemma2", hidden_size=3072).embedding_scale(kind) for kind in ("f32", "bf16", "f16")]
    assert scales == [np.float32(3072**0.5), 55.5, 55.4375]
    assert two.parameters["model.norm.weight"].offset == 1
    assert {item.offset for name, item in two.parameters.items() if name.endswith("layernorm.weight")} == {1}


def test_rotary_bases_of_gemma3():
    def both(**changes):
        c = config(model_type="gemma3_text", **changes)
        return (c.rope_theta, c.rope_scaling), (c.local_rope_theta, c.local_rope_scaling)

    assert both() == ((1e6, None), (1e4, None))
    nested = {"full_attention": {"rope_theta": 5e5, **LINEAR}, "sliding_attention": {"rope_theta": 2e4}}
    earlier = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR}
    assert both(rope_parameters=nested) == both(**earlier)
    assert both(**earlier)[0][1].factor == 2
    assert both(**earlier)[1] == (2e4, None)
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
    types = ["full_attention"] * 2 + ["sliding_attention"]
    assert config(model_type="ministral", layer_types=types).sliding_windows == (None, None, 4096)


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
    assert config(model_type="phi3").rope_scaling is None
    rows = Rows.causal(*np.arange(10).reshape(5, 2), lengths=np.array([128, 129]))
    assert list(table.places.values(rows)) == [0, 3]


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
