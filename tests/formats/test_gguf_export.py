"""An exported GGUF file holds the weights, the metadata and the tokenizer that llama.cpp asks for.

That llama.cpp computes the same from it is for tests/exchange to show.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import FIXTURES, path_of
from support.events import hearing
from support.gguf_models import DEMO, make_adapter, read, small, values

from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.formats.safetensors_checkpoint import Checkpoint
from wgpu_lora.formats.safetensors_writer import TensorSpec, write_shards
from wgpu_lora.models.architectures import load_config, parse_config
from wgpu_lora.models.export import gguf_export
from wgpu_lora.models.export.adapter_merge import merge_adapter
from wgpu_lora.models.export.gguf_export import export_adapter, export_model, export_models
from wgpu_lora.models.model_files import config_of


def test_the_demo(tmp_path: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    events = hearing(written=lambda *event: progress.append(event))
    model = export_model(DEMO, tmp_path / "demo.gguf", "q4_k_m", name="demo", events=events)
    shapes = config_of(DEMO).parameter_shapes()
    assert progress == [(name, number, len(shapes)) for number, name in enumerate(shapes, 1)]
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
    assert model.nbytes == (tmp_path / "demo.gguf").stat().st_size
    assert model.bits_per_weight == pytest.approx(8 * sum(t.n_bytes for t in tensors.values()) / model.values)
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


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ('---\nlicense: "apache-2.0"\ntags: []\n---\nlicense: mit\n', "apache-2.0"),
        ("---\ntags: []\n---\nlicense: mit\n", None),
    ],
)
def test_the_licence_of_the_card_goes_along(tmp_path: Path, card: str, expected: str | None) -> None:
    model = small(tmp_path / "m", "qwen2")
    (model / "README.md").write_text(card)
    for source, output in ((model, "a.gguf"), (tmp_path / "a.gguf", "b.gguf")):
        export_model(source, tmp_path / output)
        assert read(tmp_path / output)[0].get("general.license") == expected


@pytest.mark.parametrize("architecture", ["demo", "llama"])
def test_a_gguf_file_as_the_model(tmp_path: Path, architecture: str) -> None:
    """Exported again it is the same file, but for what a type rounds."""
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    model = DEMO if architecture == "demo" else small(tmp_path / "model", "llama", rope_parameters=scaling)
    export_model(model, tmp_path / "base.gguf", name="it")
    export_model(tmp_path / "base.gguf", tmp_path / "again.gguf", name="it")
    (facts, tensors), (same_facts, same_tensors) = read(tmp_path / "base.gguf"), read(tmp_path / "again.gguf")
    assert same_facts == facts
    assert list(same_tensors) == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(same_tensors[name].data, tensor.data)
    adapter = make_adapter(tmp_path / "adapter", model)
    export_adapter(model, adapter, tmp_path / "one.gguf")
    export_adapter(tmp_path / "base.gguf", adapter, tmp_path / "other.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()


def test_several_types_at_once_are_those_of_one_by_one(tmp_path: Path) -> None:
    model = small(tmp_path / "model", "qwen3")
    adapter, kinds, callback = make_adapter(tmp_path / "adapter", model), ("q4_k_m", "q5_k_m", "q6_k"), Mock()
    outputs = {kind: tmp_path / f"{kind}.gguf" for kind in kinds}
    models = export_models(model, outputs, adapter, events=hearing(written=callback))
    assert callback.call_count == len({call.args[0] for call in callback.call_args_list})
    for kind in kinds:
        assert export_model(model, tmp_path / f"alone-{kind}.gguf", kind, adapter) == models[kind]
        assert outputs[kind].read_bytes() == (tmp_path / f"alone-{kind}.gguf").read_bytes()


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("model", "output", "more", "message"),
    [
        ("model", "out.gguf", ["q3_k"], "quantize=.q3_k. is not known"),
        ("model", "no/out.gguf", [], "does not exist: create it first"),
        ("model", ".", [], "is not a file"),
        ("model", "model/config.json", [], "exists already"),
        ("bare", "out.gguf", [], "has no tokenizer.json"),
        ("other", "out.gguf", ["f16", "adapter"], "does not fit"),
        ("model", "out.gguf", ["q8_0", "huge"], "beyond 65,504"),
        ("long", "out.gguf", [], "token ids up to 9,999"),
        ("other", "out.gguf", ["lora", "adapter"], "does not fit"),
        ("model", "model/config.json", ["lora", "adapter"], "exists already"),
    ],
)
def test_refusals_leave_nothing(tmp_path: Path, model: str, output: str, more: list[str], message: str) -> None:
    for name in {"model", model}:
        kind = {"architecture": "llama", "hidden_size": 128} if name == "other" else {"architecture": "qwen2"}
        small(tmp_path / name, **kind)
    (tmp_path / "bare" / "tokenizer.json").unlink(missing_ok=True)
    if model == "long":
        change(tmp_path / "long/tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update({"zz": 9999}))
    make_adapter(tmp_path / "adapter", tmp_path / "model")
    make_adapter(tmp_path / "huge", tmp_path / "model", lora_alpha=1e9)
    before = sorted(tmp_path.rglob("*"))
    adapter, lora = [tmp_path / name for name in more[1:]], more[:1] == ["lora"]
    arguments = [*adapter, tmp_path / output] if lora else [tmp_path / output, *more[:1], *adapter]
    with pytest.raises(UserError, match=message):
        (export_adapter if lora else export_model)(tmp_path / model, *arguments)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_an_interruption_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    events = hearing(written=Mock(side_effect=[None] * 4 + [failure]))
    with pytest.raises(failure):
        export_model(DEMO, tmp_path / "out.gguf", "q8_0", events=events)
    assert not list(tmp_path.iterdir())


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    model = small(tmp_path / "model", "qwen2")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = np.nan
    save_file(weights, model / "model.safetensors")
    with pytest.raises(UserError, match="not finite"):
        export_model(model, tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("what", ["gguf", "merge"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, what: str) -> None:
    model = small(tmp_path / "model", "qwen2")
    adapter = make_adapter(tmp_path / "adapter", model)
    write = {
        "gguf": lambda model: export_model(model, tmp_path / "out.gguf"),
        "merge": lambda model: merge_adapter(model, adapter, tmp_path / "out"),
    }[what]
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(UserError, match=r"out.* cannot be written \(File too large\): free space"):
            write(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]


CHILD = """
import resource, sys
from pathlib import Path
from wgpu_lora.models.export import adapter_merge
from wgpu_lora.models.export.gguf_export import export_model
adapter_merge.PIECE = 1 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_model(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_model_is_never_whole_in_memory(tmp_path: Path) -> None:
    """Neither written from safetensors nor from a GGUF file, which is decoded by rows."""
    model = small(tmp_path / "model", "qwen2")
    wide = {"hidden_size": 512, "vocab_size": 80_000, "tie_word_embeddings": True, "intermediate_size": 512}
    change(model / "config.json", lambda config: config.update(wide))
    shapes = load_config(model).parameter_shapes()
    tile = np.random.default_rng(0).normal(0, 0.02, 1 << 16).astype(np.float16)
    specs = {name: TensorSpec("F16", shape) for name, shape in shapes.items()}
    write_shards(model, specs, lambda name: [np.resize(tile, shapes[name])])
    size = (model / "model.safetensors").stat().st_size
    for source, output, kind in ((model, "first.gguf", "q8_0"), (tmp_path / "first.gguf", "second.gguf", "q4_k_m")):
        command = [sys.executable, "-c", CHILD, str(source), str(tmp_path / output), kind]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(run.stdout) * 1024 < 0.7 * size
