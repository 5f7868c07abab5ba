"""The golden values of DoRA and of PEFT's initialisations are what PEFT says today."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import FIXTURES, path_of

from wgpu_lora.formats.peft_adapter import tensor_name, write_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.train.run.adapter_init import double_rank, halve_rank, split_offset

pytestmark = pytest.mark.reference


def test_variants(monkeypatch):
    monkeypatch.syspath_prepend(str(FIXTURES.parents[1] / "scripts"))
    import torch
    from golden.variants import variants

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
    monkeypatch.syspath_prepend(str(FIXTURES.parents[1] / "scripts"))
    from golden.models import linears, load
    from peft import PeftModel

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
        found = merged.get_submodule(module).weight.detach().numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    back = halve_rank(double_rank(config), 5)
    assert (back.r, back.lora_alpha) == (3, 5)
    pairs = {m: (tensors[tensor_name(m, "A")], tensors[tensor_name(m, "B")]) for m in want}
    own, rest = split_offset(pairs)
    for module, (a, b) in own.items():
        a0, b0 = rest[module]
        np.testing.assert_array_equal(np.concatenate([a, a0]), pairs[module][0])
        np.testing.assert_array_equal(np.concatenate([b, b0], axis=1), pairs[module][1])
