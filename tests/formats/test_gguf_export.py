"""An exported GGUF file holds the weights, the metadata and the tokenizer that llama.cpp asks for.

That llama.cpp computes the same from it is for tests/exchange to show.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support import FIXTURES, path_of
from support.events import hearing
from support.gguf_models import DEMO, make_adapter, read, small, values

from wgpu_lora.errors import UserError
from wgpu_lora.export import gguf_export
from wgpu_lora.export.adapter_merge import MergedModel, merge_adapter
from wgpu_lora.export.gguf_export import export_adapter, export_model, export_models
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.formats.safetensors_checkpoint import Checkpoint
from wgpu_lora.models.architectures import load_config, parse_config
from wgpu_lora.models.model_files import config_of


def test_the_demo(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    events = hearing(written=lambda *event: told.append(event))
    written = export_model(DEMO, tmp_path / "demo.gguf", "q4_k_m", name="demo", events=events)
    shapes = config_of(DEMO).parameter_shapes()
    assert told == [(name, number, len(shapes)) for number, name in enumerate(shapes, 1)]
    facts, tensors = read(tmp_path / "demo.gguf")
    expected = {
        "general.architecture": "qwen3",
        "general.type": "model",
        "general.name": "demo",
        "general.size_label": "3.4M",
        "general.file_type": 15,
        "general.quantization_version": 2,
        "qwen3.block_count": 6,
        "qwen3.context_length": 2048,
        "qwen3.embedding_length": 192,
        "qwen3.feed_forward_length": 512,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 64,
        "qwen3.attention.value_length": 64,
        "qwen3.rope.freq_base": 10000.0,
        "qwen3.rope.dimension_count": 64,
        "qwen3.vocab_size": 4096,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.eos_token_id": 4095,
        "tokenizer.ggml.eot_token_id": 4095,
        "tokenizer.ggml.padding_token_id": 4093,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }
    assert {key: facts.get(key) for key in expected} == expected
    assert facts["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert facts["tokenizer.ggml.tokens"][4093:] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert facts["tokenizer.ggml.token_type"] == [1] * 4093 + [3] * 3
    assert len(facts["tokenizer.ggml.merges"]) == 3837
    template = facts["tokenizer.chat_template"]
    assert "generation %}" not in template.replace("add_generation_prompt %}", "").replace("generation_prompt -%}", "")
    assert "{#- -#}{{- message['content'] + '<|im_end|>' -}}{#- -#}" in template
    # Rows of 192 are no whole super-blocks; those of 512, of ffn_down, are.
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert kinds.pop("token_embd.weight") == "Q8_0"
    assert kinds.pop("output_norm.weight") == "F32"
    for layer in range(6):
        more = layer in (2, 5)
        block = {name.split(".")[2]: kinds.pop(name) for name in list(kinds) if name.startswith(f"blk.{layer}.")}
        assert block == {
            **dict.fromkeys(("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"), "F32"),
            **dict.fromkeys(("attn_q", "attn_k", "ffn_gate", "ffn_up"), "Q5_0"),
            "attn_output": "Q4_K",
            "attn_v": "Q8_0" if more else "Q5_0",
            "ffn_down": "Q6_K" if more else "Q4_K",
        }
    assert not kinds
    assert written.nbytes == (tmp_path / "demo.gguf").stat().st_size
    assert written.bits_per_weight == pytest.approx(8 * sum(t.n_bytes for t in tensors.values()) / written.values)
    checkpoint = Checkpoint(DEMO)
    down = values(tensors["blk.3.ffn_down.weight"])
    original = checkpoint.read_f32("model.layers.3.mlp.down_proj.weight")
    assert 0.02 < np.abs(down - original).std() / original.std() < 0.08
    np.testing.assert_array_equal(values(tensors["output_norm.weight"]), checkpoint.read_f32("model.norm.weight"))


def test_the_mix_of_a_larger_model() -> None:
    config = parse_config(
        {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960}
        | {"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": False}
    )

    def kind(file: str, name: str, columns: int = 1536) -> str:
        return gguf_export.tensor_type(config, file, name, (256, columns)).name

    more = [layer for layer in range(28) if kind("q4_k_m", f"blk.{layer}.ffn_down.weight", 8960) == "Q6_K"]
    assert more == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    assert kind("q4_k_m", "blk.3.attn_v.weight") == "Q4_K"
    assert kind("q5_k_m", "blk.4.attn_v.weight") == "Q5_K"
    assert kind("q5_k_m", "blk.5.attn_v.weight") == "Q6_K"
    assert (kind("q4_k_m", "output.weight"), kind("q4_k_m", "token_embd.weight")) == ("Q6_K", "Q4_K")
    assert (kind("q4_0", "output.weight"), kind("q4_0", "blk.0.ffn_down.weight", 8960)) == ("Q6_K", "Q4_0")
    assert (kind("q8_0", "output.weight"), kind("f16", "output.weight")) == ("Q8_0", "F16")
    assert [kind(file, "blk.4.ffn_up.weight", 896) for file in ("q4_k_m", "q5_k_m", "q6_k")] == ["Q5_0", "Q5_1", "Q8_0"]
    assert kind("q6_k", "blk.4.ffn_up.weight", 40) == "F16"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "smollm3"])
def test_merged_weights_in_the_order_of_llama_cpp(tmp_path: Path, architecture: str) -> None:
    tied = architecture in ("qwen2", "qwen3")
    bias = {} if architecture in ("qwen3", "mistral", "smollm3") else {"attention_bias": True}
    model = small(tmp_path / "model", architecture, tie_word_embeddings=tied, **bias)
    adapter = make_adapter(tmp_path / "adapter", model, use_rslora=True)
    export_model(model, tmp_path / "f16.gguf", "f16", adapter)
    merged = MergedModel(model, adapter)
    facts, tensors = read(tmp_path / "f16.gguf")
    dim, heads = merged.config.head_dim, merged.config.num_attention_heads
    assert facts["general.finetune"] == "adapter"

    def expect(name: str, own: str) -> np.ndarray:
        whole = np.concatenate(list(merged.pieces(f"model.layers.1.{own}")))
        found = values(tensors[f"blk.1.{name}"])
        order = np.arange(len(whole))
        if name.startswith(("attn_q.", "attn_k.")) and architecture in ("llama", "mistral", "smollm3"):
            # Pair i of a head, which transformers has at i and i + dim / 2, comes to 2 i and 2 i + 1.
            order = order.reshape(-1, 2, dim // 2).transpose(0, 2, 1).reshape(-1)
            assert list(order[:4]) == [0, dim // 2, 1, dim // 2 + 1]
        half = whole[order].astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(found, half if found.ndim == 2 else whole[order])
        return found

    assert expect("attn_q.weight", "self_attn.q_proj.weight").shape == (heads * dim, merged.config.hidden_size)
    expect("attn_k.weight", "self_attn.k_proj.weight")
    expect("attn_v.weight", "self_attn.v_proj.weight")
    expect("ffn_down.weight", "mlp.down_proj.weight")
    expect("attn_norm.weight", "input_layernorm.weight")
    if bias:
        expect("attn_q.bias", "self_attn.q_proj.bias")
        expect("attn_k.bias", "self_attn.k_proj.bias")
        expect("attn_v.bias", "self_attn.v_proj.bias")
    assert ("output.weight" in tensors) == (not tied)


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_an_adapter_alone(tmp_path: Path, architecture: str) -> None:
    """alpha / rank B A, which is all llama.cpp computes, is ours under rsLoRA and patterns too."""
    model = small(tmp_path / "model", architecture)
    special = {"use_rslora": True, "alpha_pattern": {"q_proj": 3.0}, "rank_pattern": {"layers.1.mlp.down_proj": 7}}
    adapter = make_adapter(tmp_path / "adapter", model, **special)
    export_adapter(model, adapter, tmp_path / "lora.gguf")
    facts, tensors = read(tmp_path / "lora.gguf")
    assert facts["general.type"] == "adapter"
    assert facts["adapter.type"] == "lora"
    assert facts["general.architecture"] == architecture
    config, factors = read_adapter(adapter)
    dim = load_config(model).head_dim
    assert len(tensors) == 2 * len(factors)
    for (layer, module), name in (
        ((0, "q_proj"), "attn_q"),
        ((1, "down_proj"), "ffn_down"),
        ((1, "up_proj"), "ffn_up"),
    ):
        a, b = (values(tensors[f"blk.{layer}.{name}.weight.lora_{letter}"]) for letter in "ab")
        own_a, own_b = factors[path_of(layer, module)]
        expected = config.scaling(path_of(layer, module)) * own_b @ own_a
        if architecture == "llama" and module == "q_proj":
            expected = expected.reshape(-1, 2, dim // 2, expected.shape[1]).swapaxes(1, 2).reshape(expected.shape)
        np.testing.assert_allclose(facts["adapter.lora.alpha"] / len(a) * b @ a, expected, rtol=1e-5, atol=1e-7)


def test_a_dora_cannot_be_an_adapter_of_llama_cpp(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a DoRA, which llama\.cpp does not apply: merge it"):
        export_adapter(FIXTURES / "models" / "llama", FIXTURES / "peft" / "dora-patterns", tmp_path / "lora.gguf")
    assert not list(tmp_path.iterdir())


def test_rope(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    model = small(tmp_path / "llama3", "llama", rope_parameters=scaling)
    export_model(model, tmp_path / "llama3.gguf")
    facts, tensors = read(tmp_path / "llama3.gguf")
    factors = values(tensors["rope_freqs.weight"])
    config = load_config(model)
    np.testing.assert_array_equal(factors, config.gguf().tensors(config)["rope_freqs.weight"])
    assert factors[0] == 1.0
    assert factors[-1] == 4.0  # the config's factor, of the slowest pair
    assert (np.diff(factors) >= 0).all()
    assert "llama.rope.scaling.type" not in facts
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    for name, factor in (("plain", None), ("own", 1.5)):
        model = small(tmp_path / name, "qwen3", rope_parameters={**yarn, "attention_factor": factor})
        export_model(model, tmp_path / f"{name}.gguf")
        facts, _ = read(tmp_path / f"{name}.gguf")
        assert facts["qwen3.rope.scaling.type"] == "yarn"
        assert facts["qwen3.rope.scaling.factor"] == 4.0
        assert facts["qwen3.rope.scaling.original_context_length"] == 32
        own = facts.get("qwen3.rope.scaling.attn_factor")
        assert own == (None if factor is None else pytest.approx(1.5 / (1 + 0.1 * np.log(4))))
    model = small(
        tmp_path / "linear", "qwen2", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    )
    export_model(model, tmp_path / "linear.gguf")
    facts, _ = read(tmp_path / "linear.gguf")
    assert (facts["qwen2.rope.scaling.type"], facts["qwen2.rope.scaling.factor"]) == ("linear", 2.0)


def test_a_sliding_window_is_said(tmp_path: Path) -> None:
    model = small(tmp_path / "model", "mistral", sliding_window=7)
    (note,) = export_model(model, tmp_path / "model.gguf").notes
    assert "up to 7 tokens are exact" in note
    assert config_of(tmp_path / "model.gguf").sliding_windows == config_of(model).sliding_windows
    assert export_model(small(tmp_path / "q", "qwen2", use_sliding_window=False), tmp_path / "q.gguf").notes == ()


def test_the_licence_of_the_card_goes_along(tmp_path: Path) -> None:
    model = tmp_path / "m"
    shutil.copytree(DEMO, model)
    for card, expected in (
        ("---\nlicense: apache-2.0\ntags: []\n---\nlicense: mit\n", "apache-2.0"),
        ("---\ntags: []\n---\nlicense: mit\n", None),
        ("license: mit\n", None),
        ('---\nlicense: "cc-by-4.0"\n---\n', "cc-by-4.0"),
    ):
        (model / "README.md").write_text(card)
        (tmp_path / "a.gguf").unlink(missing_ok=True)
        export_model(model, tmp_path / "a.gguf")
        assert read(tmp_path / "a.gguf")[0].get("general.license") == expected
    export_model(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert read(tmp_path / "b.gguf")[0]["general.license"] == "cc-by-4.0"


@pytest.mark.parametrize("architecture", ["demo", "llama"])
def test_a_gguf_file_as_the_model(tmp_path: Path, architecture: str) -> None:
    """Exported again it is the same file, but for what a type rounds; an adapter merges into it as into a directory."""
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    model = DEMO if architecture == "demo" else small(tmp_path / "model", "llama", rope_parameters=scaling)
    adapter = make_adapter(tmp_path / "adapter", model)
    export_model(model, tmp_path / "base.gguf", name="it")
    export_model(tmp_path / "base.gguf", tmp_path / "again.gguf", name="it")
    (facts, tensors), (same_facts, same_tensors) = read(tmp_path / "base.gguf"), read(tmp_path / "again.gguf")
    assert same_facts == facts
    assert list(same_tensors) == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(same_tensors[name].data, tensor.data)
    export_model(tmp_path / "base.gguf", tmp_path / "merged.gguf", adapter=adapter)
    merged = read(tmp_path / "merged.gguf")[1]
    expected = MergedModel(model, adapter)
    for name in ("q_proj", "v_proj"):
        whole = np.concatenate(list(expected.pieces(f"model.layers.1.self_attn.{name}.weight")))
        found = values(merged[f"blk.1.attn_{name[0]}.weight"])
        if architecture == "llama" and name == "q_proj":
            whole = whole.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(whole.shape)
        np.testing.assert_allclose(found, whole, atol=1e-3 * np.abs(whole).max())
    export_adapter(model, adapter, tmp_path / "one.gguf")
    export_adapter(tmp_path / "base.gguf", adapter, tmp_path / "other.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()


def test_an_adapter_merges_into_a_gguf_file(tmp_path: Path) -> None:
    model = small(tmp_path / "model", "llama")
    adapter = make_adapter(tmp_path / "adapter", model)
    export_model(model, tmp_path / "base.gguf")
    for base, output in ((model, "one"), (tmp_path / "base.gguf", "other")):
        merge_adapter(base, adapter, tmp_path / output, "f32")
    one, other = Checkpoint(tmp_path / "one"), Checkpoint(tmp_path / "other")
    assert one.names() == other.names()
    for name in one.names():
        np.testing.assert_array_equal(one.read_f32(name), other.read_f32(name))  # the made weights are f16 anyway
    assert load_config(tmp_path / "other").num_key_value_heads == 2


def test_several_types_at_once_are_those_of_one_by_one(tmp_path: Path) -> None:
    model = small(tmp_path / "model", "qwen3")
    adapter = make_adapter(tmp_path / "adapter", model)
    kinds = ("q4_k_m", "q5_k_m", "q6_k")
    tensors: list[str] = []
    events = hearing(written=lambda name, done, total: tensors.append(name))
    found = export_models(model, {kind: tmp_path / f"{kind}.gguf" for kind in kinds}, adapter, events=events)
    assert len(tensors) == len(set(tensors))
    for kind in kinds:
        alone = export_model(model, tmp_path / "alone.gguf", kind, adapter)
        assert alone == found[kind]
        assert (tmp_path / f"{kind}.gguf").read_bytes() == (tmp_path / "alone.gguf").read_bytes()
        (tmp_path / "alone.gguf").unlink()
