"""The golden fixtures are what torch, transformers, PEFT and bitsandbytes say today, DoRA too."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import FIXTURES, path_of
from support.training.optimizing import GOLDEN_LIMITS

from wgpu_lora.formats.peft_adapter import PARTS, read_adapter, tensor_name, write_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.formats.safetensors_checkpoint import Checkpoint
from wgpu_lora.models.adapter_modules import target_modules_text
from wgpu_lora.models.model_files import config_of
from wgpu_lora.train.run.adapter_init import double_rank, halve_rank, split_offset

pytestmark = pytest.mark.reference
Arrays = dict[str, np.ndarray]
ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral", "smollm3", "phi3", "gemma2", "gemma3_text", "gemma3")
ARCHITECTURES += ("ministral", "ministral3", "qwen3_5_text")


@pytest.fixture(autouse=True)
def _golden_scripts(monkeypatch):
    import torch

    torch.set_num_threads(1)


def assert_same_numbers(live: Arrays, stored: Arrays) -> None:
    """What one evaluation gives, without training."""
    assert live.keys() == stored.keys()
    for name, expected in stored.items():
        assert live[name].dtype == expected.dtype, name
        scale = np.abs(expected).max()
        np.testing.assert_allclose(live[name], expected, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


# Training amplifies the rounding of a processor: Adam divides a gradient that is almost 0 by its own size, and torch's
# Muon computes in bf16. After steps, two kinds of processor may differ by half of what our own training may.
def assert_same_ends(live: Arrays, stored: Arrays, starts: Arrays, limit: float) -> None:
    """Trained matrices, relative to their way from the start."""
    assert live.keys() == stored.keys() == starts.keys()
    for name, expected in stored.items():
        assert live[name].dtype == expected.dtype, name
        error = np.linalg.norm(live[name] - expected) / np.linalg.norm(expected - starts[name])
        assert error < limit, f"{name}: {error}"


def assert_same_curves(live: Arrays, stored: Arrays) -> None:
    """A value of each step, such as losses."""
    assert live.keys() == stored.keys()
    for name, expected in stored.items():
        assert live[name].dtype == expected.dtype, name
        scale = np.abs(expected).mean()
        np.testing.assert_allclose(live[name], expected, rtol=5e-4, atol=5e-4 * scale, err_msg=name)


def split(arrays: Arrays, *prefixes: str) -> tuple[Arrays, Arrays]:
    """(those whose names begin so, the others)."""
    begin = {name: values for name, values in arrays.items() if name.startswith(prefixes)}
    return begin, {name: values for name, values in arrays.items() if name not in begin}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_and_golden_values(architecture, tmp_path):
    from scripts.golden.golden_training import golden
    from scripts.golden.tiny_models import save

    save(architecture, tmp_path)
    live, stored = Checkpoint(tmp_path), Checkpoint(FIXTURES / "models" / architecture)
    assert live.names() == stored.names()
    for name in stored.names():
        assert live.read_raw(name).tobytes() == stored.read_raw(name).tobytes(), name
    (ends, initial), (stored_ends, stored_begun) = (
        split(arrays, "final.", "losses.", "grad_norms.")
        for arrays in (golden(architecture, tmp_path), load_file(FIXTURES / "golden" / f"{architecture}.safetensors"))
    )
    assert_same_numbers(initial, stored_begun)
    (ends, curves), (stored_ends, stored_curves) = (split(arrays, "final.") for arrays in (ends, stored_ends))
    assert_same_curves(curves, stored_curves)
    starts = {name: initial["adapter." + name.split(".", 2)[2]] for name in ends}
    assert_same_ends(ends, stored_ends, starts, 5e-4)


def test_generated_tokens():
    from scripts.golden.golden_training import generation

    live = generation(FIXTURES / "models", FIXTURES / "golden")
    stored = load_file(FIXTURES / "golden" / "generation.safetensors")
    assert live.keys() == stored.keys()
    for name, tokens in live.items():
        np.testing.assert_array_equal(tokens, stored[name], name)


def test_preference_runs(monkeypatch):
    pytest.importorskip("trl")
    from scripts.golden import golden_preferences as preferences

    monkeypatch.setattr(preferences, "STEPS", 3)
    initial = load_file(FIXTURES / "golden" / f"{preferences.ARCHITECTURE}.safetensors")
    stored = load_file(FIXTURES / "golden" / "preferences.safetensors")
    live = preferences.preferences(FIXTURES / "models", initial)
    assert live.keys() == stored.keys()
    beginnings = {name: values[:3] if values.shape == (20,) else values for name, values in stored.items()}
    curves, options = split(beginnings, *(f"{case}." for case in preferences.CASES))
    assert_same_numbers({name: live[name] for name in options}, options)
    curves = {name: values for name, values in curves.items() if ".final." not in name}
    assert_same_curves({name: live[name] for name in curves}, curves)


def test_optimizers():
    from scripts.golden.golden_optimizers import optimizers

    live, stored = optimizers(), load_file(FIXTURES / "golden" / "optimizers.safetensors")
    for case, limit in GOLDEN_LIMITS.items():
        (ends, live), (stored_ends, stored) = (split(arrays, f"{case}.") for arrays in (live, stored))
        starts = {name: live[name.replace(case, "initial", 1)] for name in ends}
        assert_same_ends(ends, stored_ends, starts, limit / 2)
    assert_same_numbers(live, stored)


def test_nf4_matrices():
    from scripts.golden.make_golden import nf4_matrices

    assert_same_numbers(nf4_matrices(), load_file(FIXTURES / "golden" / "nf4.safetensors"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_peft_loads_our_adapters_and_we_load_pefts(architecture, tmp_path):
    from peft import PeftModel

    from scripts.golden.tiny_models import linears, load

    golden = load_file(FIXTURES / "golden" / f"{architecture}.safetensors")
    model = load(FIXTURES / "models" / architecture)
    modules = list(linears(model))  # before PEFT wraps them
    ours = {
        tensor_name(path_of(layer, module, architecture), factor): golden[f"adapter.{layer}.{module}.{factor}"]
        for layer, module in modules
        for factor in "AB"
    }
    own = config_of(FIXTURES / "models" / architecture)
    targets = target_modules_text(list(own.lora_modules), own)
    config = AdapterConfig(4, 8, target_modules=targets, base_model_name_or_path="somewhere")
    write_adapter(tmp_path / "ours", ours, config)
    peft_model = PeftModel.from_pretrained(model, tmp_path / "ours")
    theirs = {
        name.replace(".default", ""): value.detach().numpy()
        for name, value in peft_model.named_parameters()
        if ".lora_" in name
    }
    assert theirs.keys() == ours.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(theirs[name], value)
    for layer, module in modules:
        scaling = peft_model.get_submodule(
            tensor_name(path_of(layer, module, architecture), "A").rsplit(".lora_A", 1)[0]
        ).scaling["default"]
        assert scaling == config.scaling(path_of(layer, module, architecture)) == 2
    peft_model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    back, pairs = read_adapter(tmp_path / "theirs")
    assert (back.r, back.lora_alpha, back.use_rslora) == (4, 8, False)
    for module, (a, b) in pairs.items():
        np.testing.assert_array_equal(a, ours[tensor_name(module, "A")])
        np.testing.assert_array_equal(b, ours[tensor_name(module, "B")])
    assert len(pairs) * 2 == len(ours)


@pytest.mark.parametrize("name", ["patterns", "rslora", "expression", "rslora-patterns", "dora-patterns"])
def test_pefts_options_and_ours_give_the_same_logits(name, tmp_path):
    from scripts.golden import golden_training as adapters

    models, stored = FIXTURES / "models", load_file(FIXTURES / "golden" / "peft.safetensors")
    ids, expected = stored[f"{name}.input_ids"], stored[f"{name}.logits"]
    adapters.save_adapter(name, models, tmp_path / "theirs")
    assert_same_numbers({name: adapters.adapter_logits(name, models, tmp_path / "theirs", ids)}, {name: expected})
    # Read and written by us, it is the same adapter to PEFT.
    config, matrices = read_adapter(tmp_path / "theirs")
    tensors = {
        tensor_name(module, factor): value
        for module, pair in matrices.items()
        for factor, value in zip(PARTS, pair, strict=False)
    }
    write_adapter(tmp_path / "ours", tensors, config)
    assert_same_numbers({name: adapters.adapter_logits(name, models, tmp_path / "ours", ids)}, {name: expected})


pytestmark = pytest.mark.reference


def test_variants(monkeypatch):
    import torch

    from scripts.golden.golden_training import variants

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    live = variants(FIXTURES / "models", FIXTURES / "golden")
    stored = load_file(FIXTURES / "golden" / "variants.safetensors")
    assert live.keys() == stored.keys()
    for name, expected in stored.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(live[name], expected, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


def test_peft_loads_a_converted_pissa(monkeypatch, tmp_path):
    """Two ranks of [A; A0] and [B, -B0], of rsLoRA, on the unmodified base: PEFT's weights are those that we mean."""
    from peft import PeftModel

    from scripts.golden.tiny_models import linears, load

    rng, model = np.random.default_rng(0), load(FIXTURES / "models" / "llama")
    config = AdapterConfig(3, 5, use_rslora=True, target_modules=("q_proj",))
    layers = [layer for layer, module in linears(model) if module == "q_proj"]
    weights = {layer: linears(model)[layer, "q_proj"].weight.detach().numpy().copy() for layer in layers}
    size, tensors, want = weights[layers[0]].shape, {}, {}
    for layer in layers:
        a, a0 = rng.standard_normal((2, 3, size[1]), np.float32)
        b, b0 = rng.standard_normal((2, size[0], 3), np.float32)
        module = path_of(layer, "q_proj")
        tensors[tensor_name(module, "A")] = np.concatenate([a, a0])
        tensors[tensor_name(module, "B")] = np.concatenate([b, -b0], axis=1)
        want[module] = weights[layer] + config.scaling(module) * (b @ a - b0 @ a0)
    write_adapter(tmp_path / "ours", tensors, double_rank(config))
    merged = PeftModel.from_pretrained(model, tmp_path / "ours").merge_and_unload()
    for module, expected in want.items():
        merged_weight = merged.get_submodule(module).weight.detach().numpy()
        np.testing.assert_allclose(merged_weight, expected, atol=1e-5 * np.abs(expected).max())
    back = halve_rank(double_rank(config), 5)
    assert (back.r, back.lora_alpha) == (3, 5)
    pairs = {m: (tensors[tensor_name(m, "A")], tensors[tensor_name(m, "B")]) for m in want}
    own, tail = split_offset(pairs)
    for module, (a, b) in own.items():
        a0, b0 = tail[module]
        np.testing.assert_array_equal(np.concatenate([a, a0]), pairs[module][0])
        np.testing.assert_array_equal(np.concatenate([b, b0], axis=1), pairs[module][1])
